#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <map>
#include <span>
#include <utility>

#include "framework/training/optimizers/optimizer.h"
#include "parallel/collectives/device_mesh.h"
#include "parallel/fsdp/fully_shard.h"
#include "parallel/guarded_tensor.h"

namespace megashard {
namespace {

/// A matrix, or a stack of them, and how a group of ranks shares it.
struct Matrix {
  const SteppedParameter* parameter;
  std::vector<int64_t> sizes;  // of the whole
  int64_t dim = 0;             // that is cut
  std::vector<int64_t> split_shapes;

  bool is_stack() const { return sizes.size() > 2; }
  int64_t products() const { return sizes[0] * sizes[1] * std::min(sizes[0], sizes[1]); }
  int64_t elements_of(const ChunkRange& piece) const { return piece.size * sizes[static_cast<size_t>(1 - dim)]; }
};

struct SharedMatrices {
  ProcessGroupPtr ranks;  // null: whole on every rank
  std::vector<Matrix> matrices;
};

/// Muon as Megatron's (emerging_optimizers): momentum as a mean of the gradients, each matrix orthogonalised as a
/// whole, decoupled weight decay. Of a matrix whose rows are on several ranks one of them is given all, and gives the
/// others their rows back: the ranks share the work, and every matrix is orthogonalised once.
class Muon final : public UpdateRule {
 public:
  explicit Muon(const MuonOptions& options) : options_(options) {}

  std::vector<std::string> state_names() const override { return {kMomentumBuffer}; }

  void step(const std::vector<const SteppedParameter*>& parameters, const ParamGroup& group,
            const StepContext& given) override {
    StepContext context = given;
    if (context.skip && context.skip->is_cpu()) {  // read without a wait
      if (*context.skip->const_data_ptr<float>() != 0) return;
      context.skip.reset();
    }
    for (const auto& shared : shared_matrices(parameters, group)) {
      const size_t at_once = shared.ranks == nullptr ? 1 : static_cast<size_t>(shared.ranks->size());
      for (size_t begin = 0; begin < shared.matrices.size(); begin += at_once) {
        const size_t count = std::min(at_once, shared.matrices.size() - begin);
        run_round({shared.matrices.data() + begin, count}, shared.ranks, group, context);
      }
    }
  }

  void describe(const ParamGroup& /*group*/, Dict& entry) const override {
    entry.set("momentum", options_.momentum);
    entry.set("nesterov", options_.use_nesterov);
    entry.set("ns_steps", options_.newton_schulz.num_ns_steps);
  }

 private:
  /// Who shares what, worked out once: it is the same at every step unless other parameters have gradients.
  struct Plan {
    std::vector<const SteppedParameter*> parameters{};
    std::vector<SharedMatrices> shared{};
  };

  const std::vector<SharedMatrices>& shared_matrices(const std::vector<const SteppedParameter*>& parameters,
                                                     const ParamGroup& group) {
    Plan& plan = plans_[&group];
    if (plan.parameters != parameters) plan = {parameters, by_ranks(parameters)};
    return plan.shared;
  }

  std::vector<SharedMatrices> by_ranks(const std::vector<const SteppedParameter*>& parameters) const {
    std::vector<SharedMatrices> all;
    for (const auto* each : parameters) {
      const ShardedTensor view = reshard_and_view(each->parameter);
      const auto groups = sharding_groups(view);
      Matrix matrix{.parameter = each, .sizes = view.global_sizes, .split_shapes = {}};
      if (options_.split_qkv && options_.qkv_split_shapes)
        matrix.split_shapes = options_.qkv_split_shapes(each->name, view.global_sizes);
      if (matrix.is_stack()) check_stack(*each, view);
      const ProcessGroupPtr ranks = groups.empty() || matrix.is_stack() ? nullptr : groups.front();
      if (ranks != nullptr) matrix.dim = cut_dimension(*each, view, groups);
      const auto same = std::ranges::find(all, ranks, &SharedMatrices::ranks);
      auto& shared = same == all.end() ? all.emplace_back(SharedMatrices{ranks, {}}) : *same;
      shared.matrices.push_back(std::move(matrix));
    }
    // The ranks of a round have matrices of about one size.
    for (auto& shared : all) std::ranges::stable_sort(shared.matrices, std::ranges::greater(), &Matrix::products);
    return all;
  }

  /// Throws unless this rank has whole matrices of a stack.
  static void check_stack(const SteppedParameter& each, const ShardedTensor& view) {
    const auto whole = at::IntArrayRef(view.global_sizes).slice(view.global_sizes.size() - 2);
    const auto local = view.local.sizes().slice(view.global_sizes.size() - 2);
    TORCH_CHECK_NOT_IMPLEMENTED(
        whole == local || view.local.numel() == 0, "Muon takes experts that each rank has whole, and '", each.name,
        "' is cut over more ranks than it has experts: set expert_fully_shard_parallel_size in the FSDP2 file to a "
        "number that divides the experts, or use --optimizer adam");
  }

  /// As orthogonalized(), for each matrix of a stack, too.
  at::Tensor orthogonalized_each(const at::Tensor& update, const Matrix& matrix) const {
    if (!matrix.is_stack()) return orthogonalized(update, matrix.split_shapes, options_.newton_schulz);
    const at::Tensor results = at::empty_like(update);
    const auto updates = update.flatten(0, -3), stack = results.flatten(0, -3);
    for (int64_t i = 0; i < updates.size(0); ++i)
      stack.select(0, i).copy_(orthogonalized(updates.select(0, i), {}, options_.newton_schulz));
    return results;
  }

  static int64_t cut_dimension(const SteppedParameter& each, const ShardedTensor& view,
                               const std::vector<ProcessGroupPtr>& groups) {
    for (size_t i = 0; groups.size() == 1 && i < view.placements.size(); ++i) {
      const auto& placement = view.placements[i];
      if (placement.kind != Placement::Kind::kShard || view.mesh->group(static_cast<int>(i)) != groups[0]) continue;
      const auto piece =
          chunk_range(view.global_sizes[static_cast<size_t>(placement.dim)], groups[0]->size(), groups[0]->rank());
      if (view.local.size(placement.dim) == piece.size) return placement.dim;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(false,
                                "Muon takes matrices whose rows or columns are cut over one mesh dimension, and '",
                                each.name, "' is cut otherwise (tensor parallelism): use --optimizer adam");
  }

  /// What is orthogonalised, of this rank's rows: the momentum, after it has taken the gradient in.
  at::Tensor momentum_update(const SteppedParameter& each, const StepContext& context) const {
    const at::Tensor gradient = main_gradient(each, context);
    const at::Tensor& momentum = each.states[0];
    if (context.skip) {
      momentum.copy_(at::where(context.skip->to(at::kBool), momentum, momentum.lerp(gradient, 1 - options_.momentum)));
    } else {
      momentum.lerp_(gradient, 1 - options_.momentum);
    }
    return options_.use_nesterov ? gradient.lerp(momentum, options_.momentum) : momentum;
  }

  static void apply(const SteppedParameter& each, const at::Tensor& update, const ParamGroup& group,
                    const StepContext& context) {
    const at::Tensor main = unguarded(each.main);
    if (context.skip) {
      const at::Tensor next = (main * (1 - group.lr * group.weight_decay)).sub_(update, group.lr);
      main.copy_(at::where(context.skip->to(at::kBool), main, next));
    } else {
      main.mul_(1 - group.lr * group.weight_decay).sub_(update, group.lr);
    }
    if (each.has_copy()) each.parameter.copy_(main);
  }

  /// At most one matrix a rank: rank i orthogonalises the i-th.
  void run_round(std::span<const Matrix> round, const ProcessGroupPtr& ranks, const ParamGroup& group,
                 const StepContext& context) const {
    if (ranks == nullptr) {
      const auto& parameter = *round.front().parameter;
      const at::Tensor update = momentum_update(parameter, context);
      return apply(parameter, orthogonalized_each(update, round.front()), group, context);
    }
    const int64_t size = ranks->size();
    const auto piece = [&](const Matrix& matrix, int64_t rank) {
      return chunk_range(matrix.sizes[static_cast<size_t>(matrix.dim)], size, rank);
    };
    int64_t slot = 0;  // elements; the first rank's piece is the largest
    for (const auto& matrix : round) slot = std::max(slot, matrix.elements_of(piece(matrix, 0)));
    const auto options = round.front().parameter->main.options().requires_grad(false);
    at::Tensor mine = at::zeros({size * slot}, options), theirs = at::empty({size * slot}, options);
    const auto local = [&](size_t i) {
      const at::Tensor& main = round[i].parameter->main;
      return mine.narrow(0, static_cast<int64_t>(i) * slot, main.numel()).view(main.sizes());
    };
    for (size_t i = 0; i < round.size(); ++i) local(i).copy_(momentum_update(*round[i].parameter, context));
    ranks->all_to_all_into(theirs, mine).wait();
    if (static_cast<size_t>(ranks->rank()) < round.size()) {
      const Matrix& own = round[static_cast<size_t>(ranks->rank())];
      const auto each_piece = [&](const at::Tensor& whole, const auto& take) {
        for (int64_t rank = 0; rank < size; ++rank) {
          const auto range = piece(own, rank);
          const at::Tensor part = whole.narrow(own.dim, range.offset, range.size);
          take(part, theirs.narrow(0, rank * slot, part.numel()).view(part.sizes()));
        }
      };
      const at::Tensor whole = at::empty(own.sizes, options);
      each_piece(whole, [](const at::Tensor& part, const at::Tensor& sent) { part.copy_(sent); });
      each_piece(orthogonalized(whole, own.split_shapes, options_.newton_schulz),
                 [](const at::Tensor& part, const at::Tensor& sent) { sent.copy_(part); });
    }
    ranks->all_to_all_into(mine, theirs).wait();
    for (size_t i = 0; i < round.size(); ++i) apply(*round[i].parameter, local(i), group, context);
  }

  MuonOptions options_;
  std::map<const ParamGroup*, Plan> plans_;
};

}  // namespace

std::unique_ptr<UpdateRule> make_muon(const OptimizerOptions& options) { return std::make_unique<Muon>(options.muon); }

}  // namespace megashard
