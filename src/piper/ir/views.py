"""Operators that give views, by name without overload."""

VIEWS = frozenset(
    f"aten.{name}"
    for name in [
        "_conj",
        "_neg_view",
        "_reshape_alias",
        "_unsafe_view",
        "adjoint",
        "alias",
        "as_strided",
        "chunk",
        "contiguous",
        "detach",
        "diagonal",
        "expand",
        "expand_as",
        "flatten",
        "imag",
        "lift_fresh",
        "mT",
        "movedim",
        "narrow",
        "numpy_T",
        "permute",
        "real",
        "reshape",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "swapaxes",
        "t",
        "tensor_split",
        "transpose",
        "unbind",
        "unflatten",
        "unfold",
        "unsafe_chunk",
        "unsafe_split",
        "unsafe_split_with_sizes",
        "unsqueeze",
        "view",
        "view_as",
        "view_as_complex",
        "view_as_real",
    ]
)
"""Operators whose results share memory with their first argument. ``reshape`` is one: in the graph
that was captured every reshape was a view; it copies only where a tensor that had other strides
there was received.
"""

PARTS = frozenset(
    f"aten.{name}"
    for name in [
        "chunk",
        "diagonal",
        "narrow",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "tensor_split",
        "unbind",
        "unfold",
        "unsafe_chunk",
        "unsafe_split",
        "unsafe_split_with_sizes",
    ]
)
"""Those that may show only a part of what they view."""


def is_view(target: str) -> bool:
    """Whether the operator *target*, a name with overload, gives views."""
    return target.rsplit(".", 1)[0] in VIEWS
