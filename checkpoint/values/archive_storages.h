#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "checkpoint/values/value.h"

namespace megashard {

/// A value with tensors inside, on its way from one torch archive to another: each storage that its
/// records name (entry data/NAME), once, and the value naming them by numbers instead, on the CPU.
struct RenamedStorages {
  Value value;
  std::vector<std::string> names;  ///< in the old archive; number first + i stands for names[i]
};

RenamedStorages rename_storages(const Value& value, size_t first);

}  // namespace megashard
