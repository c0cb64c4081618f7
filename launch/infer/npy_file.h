#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <fstream>
#include <string>

namespace megashard {

/// A NumPy array file [rows, columns] of fp32 or int64 that grows row by row (numpy.load).
class NpyFile {
 public:
  /// Creates missing folders. Throws UsageError when the file cannot be written.
  NpyFile(std::string path, at::ScalarType dtype, int64_t columns);
  /// [any, columns] of the dtype, on the CPU.
  void append(const at::Tensor& rows);
  /// Writes how many rows there are. Throws when something could not be written.
  void finish();

 private:
  void write_header();

  std::string path_;
  at::ScalarType dtype_;
  int64_t columns_;
  int64_t rows_ = 0;
  std::ofstream file_;
};

}  // namespace megashard
