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

/// The operators with these names, with all overloads that create tensors: "aten::mm", "aten.mm.default" and "mm" are
/// equivalent. "scaled_dot_product_attention" is its fused kernels. Throws for unknown names, and with the reason for
/// operators whose outputs cannot be kept.
OperatorList operators_named(const std::vector<std::string>& names);

/// Keeps outputs of selected operators from a region's first run and returns them in order in later runs, where those
/// operators are skipped. Intercepts operators below autograd, which therefore records and saves the same in every run.
class KeptOutputs {
 public:
  /// With `rng`, advances a generator when a skipped operator would have drawn from it.
  KeptOutputs(std::string region, std::shared_ptr<const OperatorList> operators, bool rng);

  /// While it exists, this thread's operators are intercepted by `outputs`; null: not. Regions nest: an operator that
  /// the inner region does not select is passed to the outer one.
  class Run {
   public:
    enum class Kind { kFirst, kAgain };
    Run(KeptOutputs* outputs, Kind kind);
    ~Run();
    Run(const Run&) = delete;
    Run& operator=(const Run&) = delete;
    /// Throws if a complete run requested fewer outputs than were kept.
    void finish() const;
    /// For the dispatcher. Returns false if the operator is not intercepted.
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
    at::Generator generator;         // undefined: nothing was drawn
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
