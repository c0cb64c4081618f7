#include "parallel/collectives/gloo_process_group.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>

#include "parallel/collectives/chunk_range.h"
#include "parallel/collectives/gloo_connect.h"
#include "parallel/collectives/group_store.h"
#include "parallel/collectives/host_messages.h"
#include "parallel/collectives/message_exchange.h"
#include "parallel/collectives/peer_watch.h"
#include "parallel/collectives/rank_order_reduce.h"
#include "parallel/copies/element_copy.h"
#include "parallel/device/buffer_pool.h"

namespace megashard {

namespace {

// A smaller all-reduce sends whole tensors to all ranks: one exchange instead of two.
constexpr int64_t kSmallBytes = 64 * 1024;
// Part of each peer's message that an in-place reduction reads at a time, so that it stays in the cache.
constexpr int64_t kReadBytes = 128 * 1024;

at::Tensor piece(const at::Tensor& tensor, int64_t begin, int64_t count) {
  return tensor.view({-1}).narrow(0, begin, count);
}

const char* bytes_at(const at::Tensor& tensor, int64_t element) {
  return static_cast<const char*>(tensor.const_data_ptr()) + element * static_cast<int64_t>(tensor.element_size());
}

/// Collective of one call: its messages and its way to wait for them, by default exchange_.wait().
class ExchangeTask final : public Work::Task {
 public:
  using Finish = std::function<void(MessageExchange&)>;
  ExchangeTask(ProcessGroupPtr group, MessageExchange exchange, Finish finish)
      : group_(std::move(group)), exchange_(std::move(exchange)), finish_(std::move(finish)) {}
  void finish() override {
    if (finish_) return finish_(exchange_);
    exchange_.wait();
  }

 private:
  ProcessGroupPtr group_;  // keeps the group alive until its last collective ends
  MessageExchange exchange_;
  Finish finish_;
};

class GlooProcessGroup final : public ProcessGroup,
                               public HasStore,
                               public std::enable_shared_from_this<GlooProcessGroup> {
 public:
  /// `look`: see connect_gloo.
  GlooProcessGroup(const GlooGroupOptions& options, const std::function<void()>& look)
      : ProcessGroup(options.rank, options.ranks, options.name, options.timeout), options_(options) {
    if (options_.waits == nullptr) options_.waits = std::make_shared<GroupWaits>();
    if (size() == 1) return;
    gloo_ = connect_gloo(*this, options_.store->store, options_.address, look);
    watch_.emplace(gloo_);
  }

  static std::shared_ptr<GlooProcessGroup> make(const GlooGroupOptions& options,
                                                const std::function<void()>& look = nullptr) {
    auto group = std::make_shared<GlooProcessGroup>(options, look);
    if (group->size() > 1) group->host_ = HostMessages::connect(*group);
    if (group->host_ != nullptr) group->options_.waits->set_board(group->host_, group->ranks());
    return group;
  }

  c10::DeviceType device_type() const override { return c10::kCPU; }
  std::shared_ptr<GroupStore> store() const override { return options_.store; }
  bool takes_narrow_sums() const override { return true; }

  Work all_gather_into(at::Tensor output, at::Tensor input) override {
    check_tensors("all_gather", Shapes::kGather, output, input);
    const at::AutoDispatchBelowADInplaceOrView raw;
    const int64_t n = input.numel();
    if (n == 0) return Work();
    at::Tensor own = piece(output, rank() * n, n);
    if (own.const_data_ptr() != input.const_data_ptr()) {
      std::memcpy(own.mutable_data_ptr(), input.const_data_ptr(), input.nbytes());
    }
    if (size() == 1) return Work();
    MessageExchange exchange = exchange_of("all_gather");
    for (const int peer : peers()) exchange.receive(piece(output, peer * n, n), peer);
    for (const int peer : peers()) exchange.send(own, peer);
    return start(std::move(exchange), nullptr);
  }

  Work reduce_scatter_into(at::Tensor output, at::Tensor input, ReduceOp op) override {
    check_tensors("reduce_scatter", Shapes::kScatter, output, input);
    check_reduction("reduce_scatter", input, op);
    const at::AutoDispatchBelowADInplaceOrView raw;
    const int64_t n = output.numel();
    if (n == 0) return Work();
    if (size() == 1) {
      copy_elements(output.mutable_data_ptr(), output.scalar_type(), input.const_data_ptr(), input.scalar_type(), n);
      return Work();
    }
    MessageExchange exchange = exchange_of("reduce_scatter");
    const at::Tensor received = receive_from_peers(exchange, input.nbytes() / ranks().size());
    for (const int peer : peers()) exchange.send(piece(input, peer * n, n), peer);
    return start(std::move(exchange), [this, output, input, received, op, n](MessageExchange& messages) {
      const void* own = bytes_at(input, rank() * n);
      const ReducedTypes types{.from = input.scalar_type(), .to = output.scalar_type()};
      reduce(messages, received, own, output.mutable_data_ptr(), n, types, op);
      messages.wait();
    });
  }

  Work all_reduce(at::Tensor tensor, ReduceOp op) override {
    check_tensor("all_reduce", tensor);
    check_reduction("all_reduce", tensor, op);
    const at::AutoDispatchBelowADInplaceOrView raw;
    if (size() == 1 || tensor.numel() == 0) return Work();
    return static_cast<int64_t>(tensor.nbytes()) <= kSmallBytes ? all_reduce_whole(tensor, op)
                                                                : all_reduce_by_pieces(tensor, op);
  }

  Work broadcast(at::Tensor tensor, int root) override {
    check_tensor("broadcast", tensor);
    check_root(root);
    if (size() == 1 || tensor.numel() == 0) return Work();
    // Binomial tree: with ranks counted from the root, rank r receives from r without its lowest set bit and sends to r
    // + 2^k for every 2^k below that bit.
    const int place = (rank() - root + size()) % size();
    const int lowest_bit = place == 0 ? std::numeric_limits<int>::max() : (place & -place);
    std::vector<int> children;
    for (int step = 1; step < lowest_bit && place + step < size(); step *= 2) {
      children.insert(children.begin(), (place + step + root) % size());
    }
    MessageExchange exchange = exchange_of("broadcast");
    if (place == 0) {
      for (const int child : children) exchange.send(tensor, child);
      return start(std::move(exchange), nullptr);
    }
    exchange.receive(tensor, ((place - lowest_bit) + root) % size());
    return start(std::move(exchange), [tensor, children](MessageExchange& onward) {
      onward.wait();
      for (const int child : children) onward.send(tensor, child);
      onward.wait();
    });
  }

  Work all_to_all_into(at::Tensor output, at::Tensor input, const Splits& splits) override {
    check_all_to_all(output, input, splits);
    const at::AutoDispatchBelowADInplaceOrView raw;
    TORCH_CHECK(input.numel() == 0 || output.const_data_ptr() != input.const_data_ptr(), "all_to_all of group '",
                name(), "' cannot work in place; give it an output of its own");
    const std::vector<at::Tensor> received = slices(output, splits.output), sent = slices(input, splits.input);
    const auto me = static_cast<size_t>(rank());
    if (sent[me].numel() > 0)
      std::memcpy(received[me].mutable_data_ptr(), sent[me].const_data_ptr(), sent[me].nbytes());
    if (size() == 1) return Work();
    MessageExchange exchange = exchange_of("all_to_all");
    for (const int peer : peers()) {
      if (const auto& slice = received[static_cast<size_t>(peer)]; slice.numel() > 0) exchange.receive(slice, peer);
    }
    for (const int peer : peers()) {
      if (const auto& slice = sent[static_cast<size_t>(peer)]; slice.numel() > 0) exchange.send(slice, peer);
    }
    return start(std::move(exchange), nullptr);
  }

  Work shift_into(at::Tensor output, at::Tensor input, int distance) override {
    check_tensors("shift", Shapes::kEqual, output, input);
    const at::AutoDispatchBelowADInplaceOrView raw;
    if (input.numel() == 0) return Work();
    TORCH_CHECK(output.const_data_ptr() != input.const_data_ptr(), "shift of group '", name(),
                "' cannot work in place; give it an output of its own");
    const int next = rank_behind(distance), previous = rank_behind(-distance);
    if (next == rank()) {
      std::memcpy(output.mutable_data_ptr(), input.const_data_ptr(), input.nbytes());
      return Work();
    }
    MessageExchange exchange = exchange_of("shift");
    exchange.receive(piece(output, 0, output.numel()), previous);
    exchange.send(piece(input, 0, input.numel()), next);
    return start(std::move(exchange), nullptr);
  }

  void barrier() override {
    at::Tensor token = at::empty({2}, at::kByte);
    std::memset(token.mutable_data_ptr(), 0, token.nbytes());
    // After the round with step 2^k, a rank has heard, directly or indirectly, from the 2^(k+1) ranks up to itself.
    for (int step = 1; step < size(); step *= 2) {
      MessageExchange round = exchange_of("barrier");
      round.receive(token.narrow(0, 0, 1), (rank() - step + size()) % size());
      round.send(token.narrow(0, 1, 1), (rank() + step) % size());
      round.wait();
    }
  }

  void fail(std::exception_ptr failure) override { options_.waits->note_failure(std::move(failure)); }

  std::shared_ptr<ProcessGroup> subgroup(const std::vector<int>& members, const std::string& name) override {
    return gloo_subgroup(members, name, options_.waits);
  }

  std::shared_ptr<GlooProcessGroup> apart(const std::string& name) {
    std::vector<int> all(static_cast<size_t>(size()));
    std::iota(all.begin(), all.end(), 0);
    return gloo_subgroup(all, name, options_.waits->apart());
  }

 private:
  std::shared_ptr<GlooProcessGroup> gloo_subgroup(const std::vector<int>& members, const std::string& name,
                                                  std::shared_ptr<GroupWaits> waits) {
    GlooGroupOptions options = options_;
    options.waits = std::move(waits);
    options.ranks = members_in_world(members, name);
    options.rank = place_in(members);
    options.name = name;
    const std::string prefix = next_store_prefix(name, options.ranks);
    options.store = std::make_shared<GroupStore>();
    options.store->store = c10::make_intrusive<c10d::PrefixStore>(prefix, options_.store->store);
    return make(options, [&] {
      for (const int member : members)
        if (member != rank()) watch_->throw_if_gone(member);
    });
  }

  /// Slice for each rank; equal slices if `counts` is empty.
  std::vector<at::Tensor> slices(const at::Tensor& whole, const std::vector<int64_t>& counts) const {
    std::vector<at::Tensor> parts;
    int64_t begin = 0;
    for (size_t each = 0; each < ranks().size(); ++each) {
      const int64_t count = counts.empty() ? whole.numel() / size() : counts[each];
      parts.push_back(piece(whole, begin, count));
      begin += count;
    }
    return parts;
  }

  /// The other ranks, starting after this one, so that not all send to rank 0 first.
  std::vector<int> peers() const {
    std::vector<int> others;
    for (int k = 1; k < size(); ++k) others.push_back((rank() + k) % size());
    return others;
  }

  Work start(MessageExchange exchange, ExchangeTask::Finish finish) {
    return Work(std::make_shared<ExchangeTask>(shared_from_this(), std::move(exchange), std::move(finish)));
  }

  /// Receives `slice_bytes` bytes from every peer, for reduce(). Read in place (then returns undefined), or received
  /// into the result: size() - 1 slices in the order of peers' ranks.
  at::Tensor receive_from_peers(MessageExchange& exchange, size_t slice_bytes) {
    if (exchange.reads_in_place()) {
      for (const int peer : peers()) exchange.expect(slice_bytes, peer);
      return {};
    }
    const auto bytes = static_cast<int64_t>(slice_bytes);
    at::Tensor received = pooled_empty(bytes * (size() - 1), at::kByte, c10::kCPU);
    for (const int peer : peers()) exchange.receive(received.narrow(0, slice_of(peer) * bytes, bytes), peer);
    return received;
  }
  int64_t slice_of(int peer) const { return peer < rank() ? peer : peer - 1; }

  /// Waits for receive_from_peers(), which returned `received`, and reduces its data with this rank's `own`.
  void reduce(MessageExchange& exchange, const at::Tensor& received, const void* own, void* out, int64_t count,
              ReducedTypes types, ReduceOp op) {
    const auto element = static_cast<int64_t>(c10::elementSize(types.from));
    const auto out_element = static_cast<int64_t>(c10::elementSize(types.to));
    const bool in_place = !received.defined();
    const int64_t at_once = in_place ? std::min(count, kReadBytes / element) : count;
    const at::Tensor place = in_place ? pooled_empty(at_once * element * (size() - 1), at::kByte, c10::kCPU) : received;
    auto* slices = static_cast<char*>(place.mutable_data_ptr());
    if (in_place) {
      exchange.wait_for_expected();
    } else {
      exchange.wait();
    }
    std::vector<const void*> sources(static_cast<size_t>(size()));
    for (int64_t begin = 0; begin < count; begin += at_once) {
      const int64_t offset = begin * element, bytes = std::min(at_once, count - begin) * element;
      for (int source = 0; source < size(); ++source) {
        const void* part = static_cast<const char*>(own) + offset;
        if (source != rank()) {
          char* slice = slices + slice_of(source) * at_once * element;
          part =
              in_place ? exchange.read(source, static_cast<size_t>(offset), static_cast<size_t>(bytes), slice) : slice;
        }
        sources[static_cast<size_t>(source)] = part;
      }
      reduce_in_rank_order(static_cast<char*>(out) + begin * out_element, sources, bytes / element, types, op);
    }
    if (in_place) exchange.close_expected();
  }

  Work all_reduce_whole(const at::Tensor& tensor, ReduceOp op) {
    MessageExchange exchange = exchange_of("all_reduce");
    const at::Tensor mine = at::empty_like(tensor);  // peers read it while the sum is written
    std::memcpy(mine.mutable_data_ptr(), tensor.const_data_ptr(), tensor.nbytes());
    const at::Tensor received = receive_from_peers(exchange, tensor.nbytes());
    for (const int peer : peers()) exchange.send(mine, peer);
    return start(std::move(exchange), [this, tensor, mine, received, op](MessageExchange& messages) {
      reduce(messages, received, mine.const_data_ptr(), tensor.mutable_data_ptr(), tensor.numel(),
             {tensor.scalar_type(), tensor.scalar_type()}, op);
      messages.wait();
    });
  }

  /// Reduce-scatter in place, then all-gather in place: minimal traffic.
  Work all_reduce_by_pieces(const at::Tensor& tensor, ReduceOp op) {
    const auto range_of = [this, n = tensor.numel()](int peer) { return chunk_range(n, size(), peer); };
    const ChunkRange own = range_of(rank());
    MessageExchange exchange = exchange_of("all_reduce");
    const at::Tensor received = receive_from_peers(exchange, static_cast<size_t>(own.size) * tensor.element_size());
    for (const int peer : peers()) exchange.send(piece(tensor, range_of(peer).offset, range_of(peer).size), peer);
    return start(std::move(exchange), [this, tensor, received, op, own, range_of](MessageExchange& onward) {
      const at::AutoDispatchBelowADInplaceOrView raw;
      at::Tensor reduced = piece(tensor, own.offset, own.size);
      void* data = reduced.mutable_data_ptr();
      reduce(onward, received, data, data, own.size, {tensor.scalar_type(), tensor.scalar_type()}, op);
      onward.wait();
      for (const int peer : peers()) onward.receive(piece(tensor, range_of(peer).offset, range_of(peer).size), peer);
      for (const int peer : peers()) onward.send(reduced, peer);
      onward.wait();
    });
  }

  MessageExchange exchange_of(const char* operation) {
    tag_ = tag_ == std::numeric_limits<int>::max() ? PeerWatch::kTag + 1 : tag_ + 1;
    return {{*this, *gloo_, host_.get(), *watch_, *options_.waits}, operation, tag_};
  }

  GlooGroupOptions options_;
  c10::intrusive_ptr<c10d::ProcessGroupGloo> gloo_;  // null in a group of one
  std::optional<PeerWatch> watch_;                   // unset in a group of one
  std::shared_ptr<HostMessages> host_;               // null: no peer is on this machine
  int tag_ = PeerWatch::kTag;
};

}  // namespace

GroupStorePtr make_in_process_store() {
  auto store = std::make_shared<GroupStore>();
  store->store = c10::make_intrusive<c10d::HashStore>();
  return store;
}

ProcessGroupPtr make_gloo_group(const GlooGroupOptions& options) {
  TORCH_CHECK(options.store != nullptr, "group '", options.name, "' has no store to meet in");
  return GlooProcessGroup::make(options);
}

ProcessGroupPtr make_group_apart(const ProcessGroupPtr& group, const std::string& name) {
  auto* gloo = dynamic_cast<GlooProcessGroup*>(group.get());
  TORCH_CHECK(gloo != nullptr, "group '", group->name(), "' is not one over Gloo");
  return gloo->apart(name);
}

}  // namespace megashard
