#pragma once

// Everything that a user's program needs: `#include <megashard/megashard.h>`.

#include "checkpoint/checkpoint.h"
#include "framework/data/distributed_sampler.h"
#include "framework/modules/fsdp2_mixin.h"
#include "framework/modules/model_registry.h"
#include "framework/modules/multi_modal_module.h"
#include "framework/modules/weight_init_mixin.h"
#include "framework/process_group/launch_environment.h"
#include "framework/training/register_callback.h"
#include "parallel/fsdp/custom_comm.h"
#include "parallel/fsdp/fsdp_controls.h"
#include "parallel/fsdp/fully_shard.h"
#include "parallel/fsdp/grad_norm.h"
#include "parallel/fsdp/grad_scaler.h"
#include "parallel/fsdp/unit_trace.h"
