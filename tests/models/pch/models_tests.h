// Precompiled: half of a test's compilation is these headers. Tests include what they use all the
// same.
#include <ATen/TensorOperators.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "models/decoder/decoder_model.h"
#include "parallel/fsdp/fully_shard.h"
