#include "framework/modules/deferred_replay.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <vector>

#include "framework/recompute/call_state.h"

namespace megashard {
namespace {

constexpr int64_t kLeast = int64_t{1} << 18;  // minimum number of elements
constexpr int64_t kTogether = 16;             // numbers of 16 draws in LibTorch; a remainder draws 16 again
constexpr size_t kState = at::MERSENNE_STATE_N, kAhead = at::MERSENNE_STATE_M;

/// The next state of MT19937 (Matsumoto and Nishimura, 1998).
void regenerate(std::array<uint32_t, kState>& state) {
  const auto next = [](uint32_t high, uint32_t low, uint32_t ahead) {
    return ahead ^ (((high & 0x80000000U) | (low & 0x7fffffffU)) >> 1) ^ ((low & 1U) != 0 ? 0x9908b0dfU : 0U);
  };
  for (size_t i = 0; i < kState - kAhead; ++i) state[i] = next(state[i], state[i + 1], state[i + kAhead]);
  for (size_t i = kState - kAhead; i + 1 < kState; ++i)
    state[i] = next(state[i], state[i + 1], state[i + kAhead - kState]);
  state[kState - 1] = next(state[kState - 1], state[0], state[kAhead - 1]);
}

void skip(at::mt19937& engine, int64_t draws) {
  auto data = engine.data();
  while (draws >= data.left_) {  // the last number left belongs to the next state
    draws -= data.left_;
    regenerate(data.state_);
    data.left_ = static_cast<int>(kState);
    data.next_ = 1;
  }
  data.left_ -= static_cast<int>(draws);
  data.next_ += static_cast<uint32_t>(draws);
  engine.set_data(data);
}

at::CPUGeneratorImpl& engine_of(const at::Generator& generator) {
  return *at::check_generator<at::CPUGeneratorImpl>(generator);
}

}  // namespace

bool normal_in_parts_(const at::Tensor& tensor, double mean, double std, at::Generator& generator) {
  const int64_t threads = at::get_num_threads(), size = tensor.numel();
  if (threads == 1 || size < kLeast || !tensor.is_cpu() || tensor.scalar_type() != at::kFloat ||
      !tensor.is_contiguous()) {
    return false;
  }
  const int64_t part = size / threads / kTogether * kTogether;  // the last part also gets the remainder
  std::vector<at::Generator> generators;
  auto engine = engine_of(generator).engine();
  for (int64_t i = 0; i < threads; ++i) {
    generators.push_back(generator.clone());
    engine_of(generators.back()).set_engine(engine);
    if (i + 1 < threads) skip(engine, part);
  }
  const auto flat = tensor.view({-1});
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      auto numbers = flat.slice(0, i * part, i + 1 < threads ? (i + 1) * part : size);
      numbers.normal_(mean, std, generators[i]);
    }
  });
  engine_of(generator).set_engine(engine_of(generators.back()).engine());
  return true;
}

}  // namespace megashard

namespace megashard::detail {
namespace {

/// While it exists, the default generator continues `generator`, for operations without a generator argument (rand,
/// randperm, dropout). Replays on other threads wait; code that uses the default generator directly does not.
class DefaultGeneratorSwap {
 public:
  explicit DefaultGeneratorSwap(at::Generator& generator)
      : lock_(mutex()), generator_(generator), default_(at::detail::getDefaultCPUGenerator()) {
    saved_ = generator_state(default_);
    set_generator_state(default_, generator_state(generator_));
  }
  ~DefaultGeneratorSwap() {
    set_generator_state(generator_, generator_state(default_));
    set_generator_state(default_, saved_);
  }
  DefaultGeneratorSwap(const DefaultGeneratorSwap&) = delete;
  DefaultGeneratorSwap& operator=(const DefaultGeneratorSwap&) = delete;

 private:
  static std::mutex& mutex() {
    static std::mutex each_process_has_one_default_generator;
    return each_process_has_one_default_generator;
  }

  std::lock_guard<std::mutex> lock_;
  at::Generator& generator_;
  at::Generator default_;
  at::Tensor saved_;
};

bool same_layout(const at::Tensor& real, const TapeTensor& recorded) {
  if (real.sizes() != recorded.sizes) return false;
  for (int64_t dim = 0; dim < real.dim(); ++dim) {
    if (real.size(dim) > 1 && real.stride(dim) != recorded.strides[dim]) return real.numel() == 0;
  }
  return true;
}

}  // namespace

Replay::Replay(const Tape& tape) {
  for (const auto& track : tape.tracks()) {
    auto clone = track.original.clone();
    set_generator_state(clone, track.initial);
    generators_.push_back(std::move(clone));
  }
}

at::Tensor Replay::tensor(const TapeTensor& recorded) const {
  if (!recorded.is_meta()) {
    TORCH_CHECK(!recorded.real.defined() || recorded.real._version() == recorded.real_version, "a tensor of sizes ",
                recorded.real.sizes(),
                " that a deferred construction read was changed in place before it was replayed; clone it first");
    return recorded.real;
  }
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(live_.at(recorded.key())),
                                                         c10::DispatchKeySet(c10::DispatchKey::CPU), recorded.dtype);
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(recorded.sizes, recorded.strides, recorded.offset);
  if (recorded.conjugate) impl->_set_conj(true);
  if (recorded.negative) impl->_set_neg(true);
  return tensor;
}

c10::IValue Replay::value(const TapeValue& recorded) const {
  if (const auto* plain = std::get_if<c10::IValue>(&recorded)) return *plain;
  if (const auto* one = std::get_if<TapeTensor>(&recorded)) return tensor(*one);
  const auto& many = std::get<TapeTensors>(recorded);
  if (many.optional) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& item : many.items) {
      const auto each = tensor(item);
      list.push_back(each.defined() ? std::make_optional(each) : std::nullopt);
    }
    return list;
  }
  c10::List<at::Tensor> list;
  for (const auto& item : many.items) list.push_back(tensor(item));
  return list;
}

void Replay::bind(StorageKey recorded, const c10::Storage& real) {
  if (!live_.emplace(recorded, real).second) return;
  live_bytes_ += static_cast<int64_t>(real.nbytes());
  peak_bytes_ = std::max(peak_bytes_, live_bytes_);
}

void Replay::drop(StorageKey storage) {
  const auto found = live_.find(storage);
  if (found == live_.end()) return;
  live_bytes_ -= static_cast<int64_t>(found->second.nbytes());
  live_.erase(found);
}

void Replay::call_drawing(const c10::OperatorHandle& op, int track, int generator_argument, torch::jit::Stack& stack) {
  if (generator_argument >= 0) {
    const auto base = stack.size() - op.schema().arguments().size();
    if (op.operator_name() == c10::OperatorName{"aten::normal_", ""} &&
        normal_in_parts_(stack[base].toTensor(), stack[base + 1].toDouble(), stack[base + 2].toDouble(),
                         generators_[track])) {
      stack.erase(stack.end() - 3, stack.end());  // the tensor remains as the result
      return;
    }
    stack[base + generator_argument] = c10::IValue(generators_[track]);
    op.callBoxed(stack);
  } else {
    const DefaultGeneratorSwap swap(generators_[track]);
    op.callBoxed(stack);
  }
}

void Replay::run(const Record& record) {
  const c10::InferenceMode not_inference(false);  // inference tensors cannot be trained
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (const auto key : record.overwrites) {
    if (live_.count(key) == 0) {
      bind(key, at::detail::empty_cpu({static_cast<int64_t>(key->nbytes())}, at::kByte).storage());
    }
  }
  torch::jit::Stack stack;
  for (const auto& argument : record.arguments) stack.push_back(value(argument));
  if (record.track < 0) {
    record.op.callBoxed(stack);
  } else {
    if (record.state_before.defined()) set_generator_state(generators_[record.track], record.state_before);
    call_drawing(record.op, record.track, record.generator_argument, stack);
  }
  bind_results(record, stack);
  ++operations_;
}

void Replay::bind_results(const Record& record, const torch::jit::Stack& stack) {
  const auto first = stack.size() - record.results.size();
  const auto bind_one = [&](const TapeTensor& recorded, const at::Tensor& real) {
    if (!recorded.is_meta()) return;
    TORCH_INTERNAL_ASSERT(same_layout(real, recorded), c10::toString(record.op.operator_name()), " gave sizes ",
                          real.sizes(), " strides ", real.strides(), " where its meta kernel gave ", recorded.sizes,
                          " ", recorded.strides);
    bind(recorded.key(), real.storage());
  };
  for (size_t i = 0; i < record.results.size(); ++i) {
    const auto& result = stack[first + i];
    if (const auto* one = std::get_if<TapeTensor>(&record.results[i])) {
      bind_one(*one, result.toTensor());
    } else if (const auto* many = std::get_if<TapeTensors>(&record.results[i])) {
      const auto reals = result.toTensorVector();
      for (size_t k = 0; k < reals.size(); ++k) bind_one(many->items[k], reals[k]);
    }
  }
}

}  // namespace megashard::detail
