"""Places where the product orders streams, the host and memory; each has a fault, or a reason why it has none."""

import re

from fault import ROOT

PRIMITIVES = re.compile(r"order_streams\(|make_wait\(|StreamEvent::record\(|->record\(|StreamScope (scope|\w+_scope)\b"
                        r"|synchronize\(\)|work\.wait\(\)|\)\.wait\(\)|drop_held_gather\(\);|drop_held_reduction\(\);"
                        r"|held_reduction_ = "
                        r"|wait_for_reductions\(\);|reduces_on\([^c]"
                        r"|wait_for_(offloaded_grad|host_memory)\(\);")
ROOMS = ("parallel/collectives", "parallel/copies", "parallel/fsdp", "parallel/sequence_parallel",
         "parallel/tensor_parallel", "checkpoint", "framework", "models")
DEFINITIONS = "parallel/device/streams.cpp"  # of what is looked for


def hits():
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.cpp")):
            if str(path.relative_to(ROOT)) == DEFINITIONS:
                continue
            text = path.read_text()
            for found in PRIMITIVES.finditer(text):
                begin = text.rfind("\n", 0, found.start()) + 1
                line = text[begin : text.index("\n", found.start())]
                if not line.lstrip().startswith("//"):
                    yield str(path.relative_to(ROOT)), found.start(), line.strip(), text.count("\n", 0, begin) + 1


def changed(faults):
    """Faults whose text is no longer in their file."""
    return [f"{fault.file} no longer has the place of '{fault.name}': {fault.text!r}"
            for fault in faults if fault.places() is None]


def unplanted(faults):
    """Places that no fault covers and no reason excuses; reasons for places that are gone."""
    from tables import REASONS

    spans = {}
    for fault in faults:
        spans.setdefault(fault.file, []).extend(fault.places() or ())
    used, lines = set(), []
    for file, at, line, number in hits():
        if any(begin <= at < end for begin, end in spans.get(file, ())):
            continue
        reasons = [(where, text) for where, text in REASONS if where == file and text in line]
        used.update(reasons)
        if not reasons:
            lines.append(f"{file}:{number} has no fault: {line}")
    return lines + [f"{file} no longer has the place that has a reason: {text}"
                    for file, text in REASONS if (file, text) not in used]
