// Precompiled headers: half of a test's compile time. Tests still include what they use.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

#include "parallel/fsdp/fully_shard.h"
