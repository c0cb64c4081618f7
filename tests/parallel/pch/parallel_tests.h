// Precompiled: half of a test's compilation is these headers. Tests include what they use all the
// same.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

#include "parallel/fsdp/fully_shard.h"
