#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace megashard::detail {

using OperatorList = std::vector<c10::OperatorHandle>;

/// The operators that names mean, by all their overloads that make new tensors: "aten::mm",
/// "aten.mm.default" and "mm" are the same. "scaled_dot_product_attention" means its fused kernels.
/// Throws for unknown names, and for those whose outputs cannot be kept, with the reason.
OperatorList operators_named(const std::vector<std::string>& names);

/// Outputs of chosen operators, kept from a region's first run and handed out in order in later
/// ones, where those operators do not run. Looks at operators below autograd, which therefore
/// records and saves the same in every run.
class KeptOutputs {
 public:
  /// With `rng`, a generator that a kept operator drew from is moved on when it does not run.
  KeptOutputs(std::string region, std::shared_ptr<const OperatorList> operators, bool rng);

  /// While one lives, this thread's operators pass `outputs`; null: they are left alone. Regions
  /// nest: an operator that the inner one does not choose passes the outer one.
  class Run {
   public:
    enum class Kind { kFirst, kAgain };
    Run(KeptOutputs* outputs, Kind kind);
    ~Run();
    Run(const Run&) = delete;
    Run& operator=(const Run&) = delete;
    /// Throws if the run, which reached its end, asked for fewer outputs than are kept.
    void finish() const;
    /// For the dispatcher: false if this run leaves the operator alone.
    bool take(const c10::OperatorHandle& op, torch::jit::Stack& stack);

   private:
    friend class KeptOutputs;
    KeptOutputs* outputs_;
    Kind kind_;
    Run* outer_;
    size_t next_ = 0;
    bool give_away_ = false;
    std::optional<c10::impl::IncludeDispatchKeyGuard> watching_;
  };

 private:
  struct Entry {
    c10::OperatorHandle op;
    std::vector<c10::IValue> values;
    std::vector<uint32_t> versions;  // of the tensors in `values`, in order
    at::Generator generator;         // undefined: it drew nothing
    at::Tensor generator_after;
    bool given_away = false;
  };

  bool chosen(const c10::OperatorHandle& op) const;
  void keep(const c10::OperatorHandle& op, torch::jit::Stack& stack);
  void hand_out(Run& run, const c10::OperatorHandle& op, torch::jit::Stack& stack);

  std::string region_;
  std::shared_ptr<const OperatorList> operators_;
  bool rng_;
  std::vector<Entry> entries_;
};

}  // namespace megashard::detail
