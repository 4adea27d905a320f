// Elements, and choices that are remembered.

const byId = (id) => document.getElementById(id);

/** An element with attributes and children; text is never read as HTML. */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

// A page from a file may have no storage; then a choice lasts as long as the page.
function stored(name) { try { return localStorage.getItem(`piper-${name}`); } catch { return null; } }
function store(name, value) { try { localStorage.setItem(`piper-${name}`, value); } catch { /* see above */ } }
