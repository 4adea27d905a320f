"""What each operator does to labels: one rule per kind of operator, one file per family of them.

A rule is a proof: the operator, applied to the experts and tokens that one device holds, computes
for these what it computes for them among all. A rule that cannot show that refuses, and so does an
operator without a rule.
"""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from piper.ir.body import GETITEM, Body, Call, TensorSpec, call_refs
from piper.ir.label_rules import dimensions, elementwise, products, shapes
from piper.ir.label_rules.operation import Labels, Operation, Region, Result, Rule, plain_results
from piper.ir.labels import Label

_RULES: Mapping[str, Rule] = {
    **elementwise.RULES,
    **products.RULES,
    **shapes.RULES,
    **dimensions.RULES,
}


def follow(operation: Operation) -> Result:
    """The call as it is on one device, and the labels of its results. Raises
    :class:`DirectiveError` naming an operation that mixes experts or tokens, or of which that is
    not known.
    """
    call, name = operation.call, operation.name
    if call.rng is not None:
        raise operation.refuse(
            "draws random numbers, which would depend on how experts are sharded: move dropout out of the region"
        )
    rule = _RULES.get(name)
    if rule is not None:
        return rule(operation)
    if all(label.is_plain for label in operation.inputs) and operation.inputs:
        return operation.done(*plain_results(operation))
    raise operation.refuse(
        "has no rule that says whether it works on each expert's tokens alone; write it with products, elementwise operations, "
        "and reductions over features, or move it out of the sharded region"
    )


def follow_body(
    body: Body, inputs: Sequence[Label], region: Region
) -> tuple[Body, tuple[Label, ...]]:
    """*body* as it is on one device, and the labels of its outputs. Raises what :func:`follow`
    raises.
    """
    labels: list[Labels] = [(label,) for label in inputs]
    specs: list[tuple[TensorSpec | None, ...]] = [(spec,) for spec in body.inputs]
    calls: list[Call] = []
    for call in body.calls:
        if call.target == GETITEM:
            (source,) = call_refs(call)
            index = call.args[1]
            assert isinstance(index, int)
            label, new = labels[source][index], calls[source - len(inputs)].results[index]
            calls.append(replace(call, results=(new,)))
            labels.append((label,))
        else:
            changed, found = follow(Operation(call, labels, specs, region))
            calls.append(changed)
            labels.append(found)
        specs.append(call.results)
    outputs = tuple(labels[ref][0] for ref in body.outputs)
    new_inputs = tuple(
        region.scale.spec(spec, label) for spec, label in zip(body.inputs, inputs, strict=True)
    )
    return replace(body, inputs=new_inputs, calls=tuple(calls)), outputs
