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

/// While one lives, every tensor that this thread constructs is on meta, and the operations on it
/// go to the tape. Reads of values (item(), nonzero, boolean indices, randperm) compute what they
/// need from the tape and give real tensors. Raw access to bytes (data_ptr, accessor) throws.
/// Mirrors torchdistx's deferred_init; PyTorch has no counterpart.
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

/// What construction would have done to its tensors' bytes, kept to be done later, a tensor at a
/// time.
///   InitTape tape;
///   auto model = tape.construct([&] { return std::make_shared<MyModel>(config); });
///   tape.capture(*model);
///   fully_shard(*model, options);  // on meta tensors
///   tape.materialise(*model, assign);
class InitTape {
 public:
  /// The process's default CPU generator starts the tape, and is left where an ordinary start
  /// leaves it.
  InitTape();
  /// `generator` takes the default generator's place, for ranks that are threads of one process.
  explicit InitTape(at::Generator generator);
  ~InitTape();
  InitTape(const InitTape&) = delete;
  InitTape& operator=(const InitTape&) = delete;

  /// make() under a DeferredInit; raw access to bytes in a constructor becomes a message.
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

  /// Notes which parameter and buffer of `module` is which recorded tensor. To be called after
  /// construction, before anything re-binds them (fully_shard does); materialise calls it for
  /// modules that were not captured.
  void capture(const torch::nn::Module& module);

  /// Takes the whole real tensor of one parameter or buffer, on the CPU; `target` is the module's
  /// own tensor, still on meta (after fully_shard, of local sizes). What the callee does not keep
  /// is freed when it returns.
  using Assign = std::function<void(const std::string& name, at::Tensor& target, const at::Tensor& full)>;

  struct Options {
    /// false: buffers only (a checkpoint brings the parameters). Random numbers that no buffer
    /// needs are not drawn.
    bool parameters = true;
    /// true: tensors that the constructor only allocated come with undefined contents instead of an
    /// error.
    bool allow_unset = false;
  };
  struct Report {
    int64_t tensors = 0;     ///< handed to assign
    int64_t operations = 0;  ///< replayed
    int64_t full_bytes = 0;  ///< of all tensors handed to assign
    int64_t peak_bytes = 0;  ///< largest total of whole tensors that were live at once
  };
  /// Replays the recorded operations in their order and gives each tensor on meta of `module` to
  /// `assign` as soon as no later operation touches it. Same values, and same generator state at
  /// the end, as an ordinary construction from the generator state that was current when recording
  /// began. Once a tape. Throws c10::Error naming every tensor that the construction left unset or
  /// that was made elsewhere.
  Report materialise(torch::nn::Module& module, const Assign& assign, const Options& options);
  Report materialise(torch::nn::Module& module, const Assign& assign) { return materialise(module, assign, {}); }

  size_t operations() const;  ///< recorded so far

 private:
  friend class DeferredInit;
  void explain(const c10::Error& error) const;  ///< throws if it knows better
  std::unique_ptr<detail::InitRecording> recording_;
};

/// Makes `target`, a tensor on meta, the real tensor `value` (same sizes or not), keeping its
/// identity: modules and optimizers that hold it see the change.
void become(at::Tensor& target, const at::Tensor& value);

}  // namespace megashard
