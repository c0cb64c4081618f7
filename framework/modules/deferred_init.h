#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace torch::nn {
class Module;
}

namespace megashard {

namespace detail {
class Tape;
struct InitRecording;
}  // namespace detail

class InitTape;

/// While it exists, tensors that this thread constructs are on meta, and operations on them are recorded on the tape.
/// Reads of values (item(), nonzero, boolean indices, randperm) compute what they need from the tape and return real
/// tensors. Raw data access (data_ptr, accessor) throws. Mirrors torchdistx's deferred_init; PyTorch has no equivalent.
class DeferredInit {
 public:
  explicit DeferredInit(InitTape& tape);
  ~DeferredInit();
  DeferredInit(const DeferredInit&) = delete;
  DeferredInit& operator=(const DeferredInit&) = delete;

 private:
  detail::Tape* outer_;
  bool outer_included_;
};

/// Records the construction of a model's tensors and replays it later, one tensor at a time.
///   InitTape tape;
///   auto model = tape.construct([&] { return std::make_shared<MyModel>(config); });
///   tape.capture(*model);
///   fully_shard(*model, options);  // on meta tensors
///   tape.materialise(*model, assign);
class InitTape {
 public:
  /// Starts from the state of the process's default CPU generator, and leaves that as ordinary construction does.
  InitTape();
  /// `generator` replaces the default generator, for ranks that are threads of one process.
  explicit InitTape(at::Generator generator);
  ~InitTape();
  InitTape(const InitTape&) = delete;
  InitTape& operator=(const InitTape&) = delete;

  /// Calls make() under a DeferredInit. Raw data access in a constructor throws an explanation.
  template <class Make>
  auto construct(Make make) {
    const DeferredInit guard(*this);
    try {
      return make();
    } catch (const c10::Error& error) {
      explain(error);
      throw;
    }
  }

  /// Maps the parameters and buffers of `module` to recorded tensors. Call it after construction and before they are
  /// replaced (by fully_shard); materialise calls it for modules that were not captured.
  void capture(const torch::nn::Module& module);

  /// Receives the full real tensor of a parameter or buffer on the CPU. `target` is the module's tensor, still on meta
  /// (after fully_shard with local sizes). Memory that the callee does not keep is freed on return.
  using Assign = std::function<void(const std::string& name, at::Tensor& target, const at::Tensor& full)>;

  struct Options {
    /// false: buffers only (parameters come from a checkpoint). Random numbers that no buffer needs are not drawn.
    bool parameters = true;
    /// true: tensors that the constructor only allocated have undefined contents instead of throwing.
    bool allow_unset = false;
  };
  struct Report {
    int64_t tensors = 0;     ///< passed to assign
    int64_t operations = 0;  ///< replayed
    int64_t full_bytes = 0;  ///< of all tensors passed to assign
    int64_t peak_bytes = 0;  ///< peak total of full tensors
  };
  /// Replays the recorded operations in order and passes each meta tensor of `module` to `assign` once no later
  /// operation uses it. Values and final generator state are those of an ordinary construction from the generator state
  /// at the start of the recording. Call once per tape. Throws c10::Error with the names of all tensors that the
  /// construction left unset or that were created elsewhere.
  Report materialise(torch::nn::Module& module, const Assign& assign, const Options& options);
  Report materialise(torch::nn::Module& module, const Assign& assign) { return materialise(module, assign, {}); }

  size_t operations() const;  ///< recorded so far

 private:
  friend class DeferredInit;
  void explain(const c10::Error& error) const;  ///< throws a better message if it has one
  std::unique_ptr<detail::InitRecording> recording_;
};

/// Turns `target`, a meta tensor, into the real tensor `value` (sizes may differ) in place: modules and optimizers that
/// hold it see the change.
void become(at::Tensor& target, const at::Tensor& value);

}  // namespace megashard
