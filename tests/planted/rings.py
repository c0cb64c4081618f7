"""Faults of messages in a ring, beside the compute."""

from fault import Fault, Tests, without

RING = "parallel/sequence_parallel/ring_attention.cpp"
WHOLE = Tests("parallel", "RingAttention.IsWhole*")

FAULTS = [
    without("keys travel before they are computed", RING,
            "if (ring.stream) order_streams(current_stream(sent_.device()), *ring.stream);", WHOLE),
    without("the event of keys that travel is not recorded", RING,
            "passed_ = StreamEvent::record(*ring.stream);", WHOLE, after="if (ring.stream) "),
    without("the current stream does not wait for keys that travel", RING,
            "if (!received_.is_cpu()) passed_.make_wait(current_stream(received_.device()));", WHOLE),
    Fault("gradients of keys are freed while they travel", RING,
          "work_ = ring.group->shift_into(received_, sent_, 1);",
          "work_ = ring.group->shift_into(received_, sent_, 1);\n    if (PLANTED) sent_.reset();", (WHOLE,)),
    without("the host does not wait for keys that travel on a CPU", RING, "work_.wait();",
            Tests("parallel", "RingAttention.*", device="cpu")),
]
