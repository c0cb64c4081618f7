// Precompiled: half of a test's compilation is these headers. Tests include what they use all the
// same.
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "checkpoint/checkpoint.h"
#include "tests/support/run_ranks.h"
