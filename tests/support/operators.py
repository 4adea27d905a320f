"""Which operators of the installed torch are pure, by their schemas and a list of names: what
``piper/ir/operators.txt`` has.

    python -m tests.support.operators > src/piper/ir/operators.txt
"""

import re
from collections.abc import Iterator

import torch
import torch._prims  # registers the operators of namespace prims

NAMESPACES = ("aten", "prims")

ARGUMENTS = frozenset(
    f"{kind}{text}{']' * kind.count('[')}"
    for kind in ("", "Optional[", "List[", "Optional[List[", "List[Optional[")
    for text in ("Tensor", "int", "float", "bool", "number", "str", "complex", "Device")
) | {"Generator", "Optional[Generator]"}
"""Types of arguments that a body can write down."""

HIDDEN = [
    re.compile(pattern)
    for pattern in (
        "file|save|load|print|warn|_foobar|^_test_|assert|constrain|token",  # the world outside
        "^set$|^resize|^data$|_lazy_clone|_copy_from|_saturate|renorm_$",  # another's memory
        # running statistics that are written, though the schema does not say so
        "^batch_norm$|^native_batch_norm$|_batch_norm_impl_index$|cudnn_batch_norm|miopen|instance_norm|_update_stats|_gather_stats",
        "sparse|coalesce|nested|jagged|padded|quant|^q_|int_repr|fbgemm|prepack|cslt|^(c?col_|c?row_|crow_|_)?(indices|values)(_copy)?$",
        "mkldnn(?!_rnn_layer)|_mps|^mps|vulkan|triton|^cuda$|^cpu$|_to_cpu|pin_memory|_cudnn_init|flatten_weight|nnpack",  # other devices and layouts
        "batch_dim|^_autocast|_fw_primal|_make_|_unpack_dual|_fused_ada|_fused_sgd|_amp_|_foreach_copy|overrideable",
        "^sorted$|^as_tensor$|^tensor$|^__interpolate|^__upsample|_ncf_|_pad_packed|_reshape_from_tensor",  # TorchScript's own
        "_sobol|^_index_put_impl$|_rowwise_prune|_resize_output|_grad_sum_to_size",
    )
]
"""Names of operators that do more than their schemas say, or that no training step on strided
tensors has.
"""

FILE_NAME = re.compile("file|path|name|msg|message")
"""Names of text arguments that name something outside of the computation."""


def pure_operators() -> Iterator[tuple[str, bool]]:
    """Names with overloads; whether they draw random numbers."""
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if (
            namespace not in NAMESPACES
            or any(pattern.search(name) for pattern in HIDDEN)
            or not _is_functional(schema)
        ):
            continue
        overload = schema.overload_name or "default"
        packet = getattr(getattr(torch.ops, namespace), name, None)
        found = getattr(packet, overload, None)
        if found is not None:
            yield f"{namespace}.{name}.{overload}", torch.Tag.nondeterministic_seeded in found.tags


def _is_functional(schema: torch._C.FunctionSchema) -> bool:
    """Whether it writes none of its arguments, takes what a body can write down, and gives tensors
    (and numbers besides them).
    """
    if schema.is_mutable or not schema.returns:
        return False
    for argument in schema.arguments:
        kind = str(argument.type)
        if kind not in ARGUMENTS or ("str" in kind and FILE_NAME.search(argument.name)):
            return False
    kinds = [str(result.type) for result in schema.returns]
    return kinds[0] in ("Tensor", "List[Tensor]") and {*kinds} <= {
        "Tensor",
        "Optional[Tensor]",
        "List[Tensor]",
        "int",
        "float",
    }


def text() -> str:
    """The contents of the file: by section, a line per operator with its overloads."""
    sections: dict[bool, dict[str, list[str]]] = {False: {}, True: {}}
    for target, random in sorted(set(pure_operators())):
        name, _, overload = target.rpartition(".")
        sections[random].setdefault(name, []).append(overload)
    lines = [f"# operators of torch {torch.__version__.partition('+')[0]}"]
    for random, title in ((False, "pure"), (True, "random")):
        lines += [f"[{title}]", *(f"{n} {' '.join(o)}" for n, o in sections[random].items())]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(text(), end="")  # noqa: T201
