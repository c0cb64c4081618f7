// Precompiled header: these headers take half of a test's compile time. Tests still include what they use.
#include <ATen/TensorOperators.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "models/decoder/decoder_model.h"
#include "parallel/fsdp/fully_shard.h"
