#include "launch/infer/npy_file.h"

#include <c10/util/Exception.h>

#include <filesystem>

#include "framework/diagnostics.h"

namespace megashard {
namespace {

constexpr size_t kHeaderBytes = 128;  // magic, version, length, description: a multiple of 64

}  // namespace

NpyFile::NpyFile(std::string path, at::ScalarType dtype, int64_t columns)
    : path_(std::move(path)), dtype_(dtype), columns_(columns) {
  TORCH_INTERNAL_ASSERT(dtype == at::kFloat || dtype == at::kLong);
  const auto folder = std::filesystem::path(path_).parent_path();
  std::error_code ignored;  // a folder that cannot be made shows when the file is opened
  if (!folder.empty()) std::filesystem::create_directories(folder, ignored);
  file_.open(path_, std::ios::binary | std::ios::trunc);
  if (!file_) throw UsageError(path_ + " cannot be written; check the path.");
  write_header();
}

void NpyFile::write_header() {
  const std::string type = dtype_ == at::kFloat ? "<f4" : "<i8";
  std::string text = "{'descr': '" + type + "', 'fortran_order': False, 'shape': (" + std::to_string(rows_) + ", " +
                     std::to_string(columns_) + "), }";
  constexpr size_t kBefore = 10;  // "\x93NUMPY", version 1.0, u16 length
  text.resize(kHeaderBytes - kBefore - 1, ' ');
  text += '\n';
  const char start[kBefore] = {'\x93', 'N', 'U', 'M', 'P', 'Y', 1, 0, static_cast<char>(text.size()), 0};
  file_.seekp(0);
  file_.write(start, kBefore);
  file_ << text;
}

void NpyFile::append(const at::Tensor& rows) {
  const at::Tensor values = rows.contiguous();
  TORCH_INTERNAL_ASSERT(values.dim() == 2 && values.size(1) == columns_ && values.scalar_type() == dtype_);
  file_.write(static_cast<const char*>(values.const_data_ptr()), static_cast<std::streamsize>(values.nbytes()));
  rows_ += values.size(0);
}

void NpyFile::finish() {
  write_header();
  file_.close();
  TORCH_CHECK(file_, path_, " could not be written to its end: is the disk full?");
}

}  // namespace megashard
