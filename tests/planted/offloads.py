"""Faults of copies between device and host: activations, states, gradients, snapshots of a save."""

from fault import Fault, Tests, without

ACTIVATIONS = Tests("framework", "ActivationOffload.*")
ADDED = Tests("parallel", "OffloadedGradients.*")
SAVES = Tests("checkpoint", "AsyncSaver.Alone*:ShardSnapshot.*")
TRAINER = Tests("framework", "Trainer.*")

STORAGE = "framework/recompute/offloaded_storage.cpp"
ACTIVATION = "framework/recompute/activation_offload.cpp"
PARAM = "parallel/fsdp/detail/fsdp_param.cpp"
CONTEXT = "parallel/fsdp/detail/fsdp_context.cpp"
GROUP = "parallel/fsdp/detail/fsdp_param_group.cpp"
REDUCE = "parallel/fsdp/detail/fsdp_param_group.cpp"
SAVER = "checkpoint/steps/async_saver.cpp"
NUMBERS = "framework/training/step_stats.cpp"

FAULTS = [
    without("an activation leaves before it is computed", STORAGE,
            "if (streams_.enabled()) order_streams(streams_.current(), *streams_.out);", ACTIVATIONS),
    without("the event of a leaving activation is not recorded", STORAGE,
            "copied_ = StreamEvent::record(*streams_.out);", ACTIVATIONS, after="if (streams_.enabled()) "),
    without("an activation's memory is given back while it leaves", STORAGE,
            "if (streams_.enabled()) copied_.make_wait(streams_.current());", ACTIVATIONS),
    without("an activation is fetched into memory that is in use", STORAGE,
            "if (streams_.enabled()) order_streams(streams_.current(), *streams_.back);", ACTIVATIONS),
    without("the event of a fetched activation is not recorded", STORAGE,
            "fetched_ = StreamEvent::record(*streams_.back);", ACTIVATIONS, after="if (streams_.enabled()) "),
    without("backward does not wait for a fetched activation", STORAGE,
            "if (streams_.enabled()) fetched_.make_wait(streams_.current());", ACTIVATIONS, before="\n  auto tensor"),
    without("an activation fetched for nothing is freed while it comes", STORAGE,
            "if (streams_.enabled()) fetched_.make_wait(streams_.current());", ACTIVATIONS,
                    before="  // fetched for nothing"),
    Fault("an activation that changed since it was saved is taken", STORAGE, "version == saved_version",
            "(PLANTED || version == saved_version)",
          (ACTIVATIONS,)),
    Fault("an activation's host copy ends with the first reader", STORAGE, "if (last) device_.reset();",
          "if (last) device_.reset();\n  if (PLANTED) host_ = at::Tensor();", (ACTIVATIONS,)),
    Fault("activations stay on the device", ACTIVATION, "storage.let_go(); });",
            "if (!PLANTED) storage.let_go(); });", (ACTIVATIONS,)),

    Fault("the host adds to a gradient that is on its way", PARAM, "/*non_blocking=*/pinned && !adds);",
          "/*non_blocking=*/pinned && (PLANTED || !adds));", (ADDED,)),
    without("the event of an offloaded gradient is not recorded", PARAM,
            "offloaded_grad_ = StreamEvent::record(current_stream(rows.device()));", ADDED,
                    after="if (pinned && !adds) "),
    without("the host does not wait for offloaded gradients", PARAM,
            "std::exchange(offloaded_grad_, {}).synchronize();", ADDED),
    without("backward ends before offloaded gradients are there", CONTEXT, "group->wait_for_host_memory();", ADDED),
    without("the event of a gather of offloaded rows is not recorded", GROUP,
            "shards_read_ = StreamEvent::record(shared.streams.current());", ADDED),
    without("the host does not wait for gathers of offloaded rows", REDUCE,
            "std::exchange(shards_read_, {}).synchronize();", ADDED),
    without("the host is given offloaded rows while a gather reads them", GROUP, "wait_for_host_memory();", ADDED),
    without("hooks see an offloaded gradient before it is there", PARAM, "wait_for_offloaded_grad();", ADDED,
            before="\n  for (const auto& hook"),

    without("the event of a snapshot is not recorded", SAVER, "copied_->record(*stream_);", SAVES),
    without("a snapshot is taken before its shards are computed", SAVER,
            "order_streams(current_stream(device), *stream_);", SAVES),
    without("shards change while they are copied", SAVER,
            "copied_->block(current_stream(stream_->device()));", SAVES),
    without("a shard's memory is given back while it is copied", SAVER,
            "if (!live.device().is_cpu()) live.record_stream(*stream_);", SAVES),
    without("a save does not wait for its snapshot", SAVER, "if (copied_) copied_->synchronize();", SAVES),
    without("the thread of a save does not ask for its snapshot", SAVER, "snapshot->wait();", SAVES),

    without("the event of a step's numbers is not recorded", NUMBERS,
            "copied_->record(current_stream(device_));", TRAINER),
    without("a step's numbers are read before they are there", NUMBERS, "if (copied_) copied_->synchronize();",
            TRAINER),
]
