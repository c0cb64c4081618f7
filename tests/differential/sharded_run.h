#pragma once

#include "parallel/collectives/device_mesh.h"
#include "tests/differential/unsharded_run.h"

namespace megashard::testing {

/// Trains the tree under fully_shard as one rank of the mesh. Throws an error where a loss, a
/// gradient or a weight is not what `expected` says.
void run_sharded(const TreeSpec& tree, const ExpectedRun& expected, const DeviceMeshPtr& mesh, int rank);

}  // namespace megashard::testing
