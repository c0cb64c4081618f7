"""A GPU's activity in the steps of a Chrome trace that `megashard pretrain --profile` wrote."""

import collections
import json
import re

from lines import Failure

SHOWN_KERNELS = 16
ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
LONG_GAP = 20  # microseconds; gaps between kernels without a host sync are shorter


def device_figures(text, categories=ON_DEVICE):
    """Milliseconds of the device: busy, idle between its first and its last kernel, and the longest kernels."""
    events = [each for each in json.loads(text)["traceEvents"] if each.get("cat") in categories and "dur" in each]
    if not events:
        raise Failure("the trace has no kernel")
    times, counts = collections.Counter(), collections.Counter()
    for event in events:
        name = short_name(event["name"])
        times[name] += event["dur"] / 1e3
        counts[name] += 1
    busy, gaps = busy_and_gaps(sorted((event["ts"], event["ts"] + event["dur"]) for event in events))
    long_gaps = [gap for gap in gaps if gap >= LONG_GAP]
    return {"kernels": len(events), "busy (ms)": busy / 1e3, "idle (ms)": sum(gaps) / 1e3, "long gaps": len(long_gaps),
            "in long gaps (ms)": sum(long_gaps) / 1e3,
            "longest": [{"kernel": name, "launches": counts[name], "ms": round(ms, 3)}
                        for name, ms in times.most_common(SHOWN_KERNELS)]}


def busy_and_gaps(intervals):
    """For sorted (begin, end): total time with overlaps merged, and the gaps between."""
    busy, gaps, end = 0.0, [], intervals[0][0]
    for begin, stop in intervals:
        if begin > end:
            gaps.append(begin - end)
        busy += max(0.0, stop - max(begin, end))
        end = max(end, stop)
    return busy, gaps


def short_name(name):
    """Kernel name without the parts that all instances of a template repeat."""
    name = re.sub(r"^void |\(anonymous namespace\)::|megashard::|at::native::|\(.*", "", name)
    return name[:100]
