// Precompiled header: these headers take half of a test's compile time. Tests still include what they use.
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "checkpoint/checkpoint.h"
#include "tests/support/run_ranks.h"
