// test_fully_shard_init.py: which parameters fully_shard manages, how it shards them, and what the first forward fixes.
// Each test has its upstream test's name.

#include <ATen/ops/ones.h>
#include <torch/nn/modules/conv.h>

#include "parallel/fsdp/detail/fsdp_state.h"
#include "tests/support/parity.h"
#include "tests/support/run_ranks.h"
#include "tests/support/simulated_device.h"

namespace megashard::testing {
namespace {

using Names = std::vector<std::string>;

/// Names of a unit's own parameters; relative to the unit until its root has run.
Names managed_by(const torch::nn::Module& module) {
  Names names;
  for (const auto& group : fsdp_state(module)->groups()) {
    for (const auto& param : group->params()) names.push_back(param->name());
  }
  return names;
}

/// in_proj, relu, out_proj, and a buffer, as in upstream's MLP.
struct MlpImpl : torch::nn::Module {
  explicit MlpImpl(int64_t width, uint64_t seed = 1, at::Device device = device_of_tests())
      : in_proj(add("in_proj", {{2 * width + 1, width}, {2 * width + 1}}, seed, device)),
        out_proj(add("out_proj", {{width, 2 * width + 1}, {width}}, seed + 50, device)),
        scale(register_buffer("scale", at::ones({1}))) {}
  std::shared_ptr<FormulaImpl> add(const char* name, const Sizes& sizes, uint64_t seed, at::Device device) {
    const auto layer = std::make_shared<FormulaImpl>(Sizes{}, biased);
    for (const auto& each : sizes) {
      const std::string weight = "w" + std::to_string(layer->w.size());
      layer->w.push_back(layer->register_parameter(weight, fixed(each, seed++).to(device)));
    }
    return register_module(name, layer);
  }
  static at::Tensor biased(const Weights& w, at::Tensor x) { return at::linear(x, w[0], w[1]); }
  at::Tensor forward(at::Tensor x) { return out_proj->forward(in_proj->forward(x).relu()) * scale; }

  std::shared_ptr<FormulaImpl> in_proj, out_proj;
  at::Tensor scale;
};
using Mlp = Hooked<MlpImpl>;

/// Mlps in sequence.
struct MlpsImpl : torch::nn::Module {
  explicit MlpsImpl(int depth, int64_t width = 5, at::Device device = device_of_tests()) {
    for (int i = 0; i < depth; ++i)
      mlps.push_back(register_module(std::to_string(i), std::make_shared<Mlp>(width, 100 * (i + 1), device)));
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& mlp : mlps) x = mlp->forward(x);
    return x;
  }
  std::vector<std::shared_ptr<Mlp>> mlps;
};
using Mlps = Hooked<MlpsImpl>;

TEST(FullyShardInit, test_invalid_mesh_ndim) {
  run_ranks(1, [](const ProcessGroupPtr& world) {
    const auto mesh =
        std::make_shared<DeviceMesh>(world, std::vector<int>{1, 1, 1}, Names{"replicate", "shard", "more"});
    Mlp model(5);
    contains(message_of([&] { fully_shard(model, {.mesh = mesh}); }),
             "fully_shard expects a 1-D or 2-D DeviceMesh, got 3-D");
  });
}

TEST(FullyShardInit, test_2d_mesh_without_mesh_dim_names) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    contains(message_of([&] { DeviceMesh(world, {1, 2}); }), "2 dimensions need as many names");
  });
}

TEST(FullyShardInit, test_managed_modules_single) {
  run_ranks(1, [](const ProcessGroupPtr& world) {
    Mlps model(2);
    fully_shard(model, {.mesh = flat_mesh(world)});
    EXPECT_EQ(managed_by(model), (Names{"0.in_proj.w0", "0.in_proj.w1", "0.out_proj.w0", "0.out_proj.w1",
                                        "1.in_proj.w0", "1.in_proj.w1", "1.out_proj.w0", "1.out_proj.w1"}));
  });
}

TEST(FullyShardInit, test_managed_modules_nested) {
  run_ranks(1, [](const ProcessGroupPtr& world) {
    Mlps model(2);
    fully_shard(*model.mlps[0], {.mesh = flat_mesh(world)});
    fully_shard(model, {.mesh = flat_mesh(world)});
    EXPECT_EQ(managed_by(*model.mlps[0]), (Names{"in_proj.w0", "in_proj.w1", "out_proj.w0", "out_proj.w1"}));
    EXPECT_EQ(managed_by(model), (Names{"1.in_proj.w0", "1.in_proj.w1", "1.out_proj.w0", "1.out_proj.w1"}));
  });
}

TEST(FullyShardInit, test_managed_modules_nested_fully_shard_and_replicate) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    // A replicated subtree is one that is sharded over a single rank.
    const auto replicated = std::make_shared<DeviceMesh>(world, std::vector<int>{2, 1}, Names{"replicate", "shard"});
    Mlps model(3);
    fully_shard(*model.mlps[0], {.mesh = replicated});
    fully_shard(*model.mlps[1], {.mesh = flat_mesh(world)});
    fully_shard(model, {.mesh = flat_mesh(world)});
    EXPECT_EQ(managed_by(model), (Names{"2.in_proj.w0", "2.in_proj.w1", "2.out_proj.w0", "2.out_proj.w1"}));
    EXPECT_EQ(model.mlps[0]->in_proj->w[0].size(0), 11);
    EXPECT_EQ(model.mlps[1]->in_proj->w[0].size(0), world->rank() == 0 ? 6 : 5);
    MlpsImpl plain(3);
    plain.forward(fixed({4, 5}, 1)).sum().backward();
    model.forward(fixed({4, 5}, 1)).sum().backward();
    expect_gradients_of(plain, model);
  });
}

TEST(FullyShardInit, test_managed_modules_duplicate) {
  run_ranks(1, [](const ProcessGroupPtr& world) {
    Mlps model(1);
    model.register_module("again", model.mlps[0]);
    fully_shard(model, {.mesh = flat_mesh(world)});
    EXPECT_EQ(managed_by(model).size(), 4U);
  });
}

TEST(FullyShardInit, test_managed_modules_list_of_mlps) {
  run_ranks(1, [](const ProcessGroupPtr& world) {
    Mlps model(4);
    torch::nn::Module* const list[] = {model.mlps[0].get(), model.mlps[2].get()};
    fully_shard(list, {.mesh = flat_mesh(world)});
    EXPECT_EQ(fsdp_state(*model.mlps[0]), fsdp_state(*model.mlps[2]));
    EXPECT_EQ(fsdp_state(*model.mlps[1]), nullptr);
    EXPECT_EQ(fsdp_state(*model.mlps[3]), nullptr);
    EXPECT_EQ(managed_by(*model.mlps[0]).size(), 8U);
  });
}

TEST(FullyShardInit, test_managed_states_shared_params_and_buffers) {
  run_ranks(1, [](const ProcessGroupPtr& world) {
    Mlps model(3);
    for (int i : {1, 2}) {  // all three share the first one's weight and buffer
      model.mlps[i]->register_parameter("tied", model.mlps[0]->in_proj->w[0]);
      model.mlps[i]->register_buffer("shared_scale", model.mlps[0]->scale);
    }
    const at::Tensor scale = model.mlps[0]->scale;
    fully_shard(model, {.mesh = flat_mesh(world)});
    EXPECT_EQ(managed_by(model).size(), 12U);
    EXPECT_TRUE(model.mlps[1]->named_parameters()["tied"].is_same(model.mlps[0]->in_proj->w[0]));
    for (int i : {1, 2}) EXPECT_TRUE(model.mlps[i]->named_buffers()["shared_scale"].is_same(scale));
  });
}

TEST(FullyShardInit, test_managed_states_nested_fully_shard) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Mlps model(2);
    fully_shard(*model.mlps[0], {.mesh = flat_mesh(world)});
    EXPECT_EQ(model.mlps[0]->in_proj->w[0].size(0), world->rank() == 0 ? 6 : 5);
    EXPECT_EQ(model.mlps[1]->in_proj->w[0].size(0), 11);
    const at::Tensor rows = reshard_and_view(model.mlps[0]->in_proj->w[0]).local;
    fully_shard(model, {.mesh = flat_mesh(world)});  // skips what the inner call sharded
    EXPECT_TRUE(reshard_and_view(model.mlps[0]->in_proj->w[0]).local.is_alias_of(rows));
    EXPECT_EQ(model.mlps[1]->in_proj->w[0].size(0), world->rank() == 0 ? 6 : 5);
  });
}

TEST(FullyShardInit, test_managed_states_list_of_mlps) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Mlps model(3);
    torch::nn::Module* const list[] = {model.mlps[0].get(), model.mlps[2].get()};
    fully_shard(list, {.mesh = flat_mesh(world)});
    for (int i : {0, 2}) {
      for (const auto& w : model.mlps[i]->parameters()) EXPECT_FALSE(reshard_and_view(w).is_replicated()) << i;
    }
    for (const auto& w : model.mlps[1]->parameters()) EXPECT_TRUE(reshard_and_view(w).is_replicated());
  });
}

/// Sizes of w in every slot that holds it, as seen by forward.
struct SlotsImpl : torch::nn::Module {
  SlotsImpl() {
    const auto w = fixed({5, 5}, 1).requires_grad_();
    for (const char* name : {"a", "b", "c"}) {
      slots.push_back(register_module(name, std::make_shared<FormulaImpl>(Sizes{}, linear)));
      slots.back()->w.push_back(slots.back()->register_parameter("w0", w));
    }
  }
  at::Tensor forward(at::Tensor x) {
    full = true;
    for (const auto& slot : slots) {
      full = full && slot->named_parameters()["w0"].size(0) == 5;
      x = slot->forward(x);
    }
    return x;
  }
  std::vector<std::shared_ptr<FormulaImpl>> slots;
  bool full = false;
};

TEST(FullyShardInit, test_get_param_module_infos_shared_params) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Hooked<SlotsImpl> model;
    fully_shard(model, {.mesh = flat_mesh(world), .reshard_after_forward = true});
    EXPECT_EQ(managed_by(model), (Names{"a.w0"}));
    model.forward(fixed({4, 5}, 2)).sum().backward();
    EXPECT_TRUE(model.full);
    for (const auto& slot : model.slots) {  // one tensor, resharded in every slot
      EXPECT_TRUE(slot->w[0].is_same(model.slots[0]->w[0]));
      EXPECT_EQ(slot->named_parameters()["w0"].size(0), world->rank() == 0 ? 3 : 2);
      EXPECT_TRUE(slot->w[0].grad().defined());
    }
  });
}

TEST(FullyShardInit, test_get_param_module_infos_duplicates) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    MlpsImpl plain(1);
    Mlps model(1);
    for (MlpsImpl* each : {&plain, static_cast<MlpsImpl*>(&model)}) {
      each->register_module("again", each->mlps[0]);
      each->mlps.push_back(each->mlps[0]);
    }
    fully_shard(model, {.mesh = flat_mesh(world), .reshard_after_forward = true});
    const at::Tensor expected = plain.forward(fixed({4, 5}, 2)), y = model.forward(fixed({4, 5}, 2));
    EXPECT_TRUE(at::equal(y, expected));
    expected.sum().backward();
    y.sum().backward();
    EXPECT_EQ(model.named_parameters().size(), 8U);  // both paths lead to the same module with four parameters
    expect_gradients_of(plain, model);
  });
}

TEST(FullyShardInit, test_get_param_module_infos_list_of_mlps) {
  run_ranks(1, [](const ProcessGroupPtr& world) {
    Mlps model(2);
    torch::nn::Module* const list[] = {model.mlps[0].get(), model.mlps[1].get()};
    fully_shard(list, {.mesh = flat_mesh(world)});
    fully_shard(model, {.mesh = flat_mesh(world)});
    EXPECT_TRUE(fsdp_state(model)->groups().empty());  // no parameter was left
    model.forward(fixed({4, 5}, 2));
    EXPECT_EQ(managed_by(*model.mlps[1]), (Names{"0.in_proj.w0", "0.in_proj.w1", "0.out_proj.w0", "0.out_proj.w1",
                                                 "1.in_proj.w0", "1.in_proj.w1", "1.out_proj.w0", "1.out_proj.w1"}));
  });
}

TEST(FullyShardInit, test_shard_tensor_parameters) {
  for (const int ranks : {1, 2, 3, 4, 8}) {
    run_ranks(ranks, [](const ProcessGroupPtr& world) {
      const Sizes sizes{{13, 3}, {4}, {1, 6}, {5, 2, 3}, {8, 8}};
      FormulaImpl plain(sizes, linear);
      Formula unit(sizes, linear);
      fully_shard(unit, {.mesh = flat_mesh(world)});
      for (size_t i = 0; i < sizes.size(); ++i) {
        const auto view = reshard_and_view(unit.w[i]);
        EXPECT_EQ(view.global_sizes, sizes[i]);
        EXPECT_EQ(view.placements, (std::vector<Placement>{Placement::shard(0)}));
        EXPECT_TRUE(view.local.is_contiguous());
        EXPECT_TRUE(unit.w[i].requires_grad() && unit.w[i].is_leaf());
        const auto chunks = plain.w[i].detach().chunk(world->size());
        const auto rank = static_cast<size_t>(world->rank());
        if (rank < chunks.size()) {
          EXPECT_TRUE(at::equal(view.local, chunks[rank]));
        } else {
          std::vector<int64_t> none = sizes[i];
          none[0] = 0;
          EXPECT_EQ(view.local.sizes().vec(), none);
        }
      }
    });
  }
}

TEST(FullyShardInit, test_raise_scalar_parameter) {
  run_ranks(1, [](const ProcessGroupPtr& world) {
    Formula model({{4, 4}, {}}, linear);
    contains(message_of([&] { fully_shard(model, {.mesh = flat_mesh(world)}); }),
             "Change 'w1' to a 1-D tensor with numel equal to 1");
  });
}

struct ConvImpl : torch::nn::Module {
  ConvImpl() : conv(register_module("conv", torch::nn::Conv2d(3, 4, 3))) {}
  at::Tensor forward(at::Tensor x) { return conv->forward(x); }
  torch::nn::Conv2d conv;
};

TEST(FullyShardInit, test_raise_noncontiguous_parameter) {
  run_ranks(1, [](const ProcessGroupPtr& world) {
    Hooked<ConvImpl> model;
    at::Tensor& weight = model.conv->weight;
    weight.set_data(weight.detach().contiguous(at::MemoryFormat::ChannelsLast));
    contains(message_of([&] { fully_shard(model, {.mesh = flat_mesh(world)}); }),
             "parameter 'conv.weight' is not contiguous");
  });
}

TEST(FullyShardInit, test_fully_shard_is_root) {
  run_ranks(1, [](const ProcessGroupPtr& world) {
    Mlps model(3);
    for (int i : {0, 2}) fully_shard(*model.mlps[i], {.mesh = flat_mesh(world)});
    fully_shard(model, {.mesh = flat_mesh(world)});
    EXPECT_EQ(fsdp_state(model)->context(), nullptr);  // unknown before the first forward
    model.forward(fixed({4, 5}, 1));
    const auto* context = fsdp_state(model)->context();
    EXPECT_EQ(context->states, (std::vector<FsdpState*>{fsdp_state(model).get(), fsdp_state(*model.mlps[0]).get(),
                                                        fsdp_state(*model.mlps[2]).get()}));
    for (int i : {0, 2}) EXPECT_EQ(fsdp_state(*model.mlps[i])->context(), context);
  });
}

TEST(FullyShardInit, test_fully_shard_module_and_param_fqns) {
  run_ranks(1, [](const ProcessGroupPtr& world) {
    Mlps model(3);
    torch::nn::Module* const list[] = {model.mlps[1].get(), model.mlps[2].get()};
    fully_shard(list, {.mesh = flat_mesh(world)});
    fully_shard(model, {.mesh = flat_mesh(world)});
    model.forward(fixed({4, 5}, 1));
    EXPECT_EQ(fsdp_state(*model.mlps[1])->name(), "1");
    EXPECT_EQ(managed_by(model), (Names{"0.in_proj.w0", "0.in_proj.w1", "0.out_proj.w0", "0.out_proj.w1"}));
    EXPECT_EQ(managed_by(*model.mlps[2]), (Names{"1.in_proj.w0", "1.in_proj.w1", "1.out_proj.w0", "1.out_proj.w1",
                                                 "2.in_proj.w0", "2.in_proj.w1", "2.out_proj.w0", "2.out_proj.w1"}));
  });
}

TEST(FullyShardInit, test_fully_shard_double_lazy_init) {
  run_ranks(1, [](const ProcessGroupPtr& world) {
    Mlps model(2);
    fully_shard(*model.mlps[0], {.mesh = flat_mesh(world)});
    fully_shard(model, {.mesh = flat_mesh(world)});
    model.mlps[0]->forward(fixed({4, 5}, 1));
    contains(message_of([&] {
               model.forward(fixed({4, 5}, 1));
             }),
             "module '0' ran forward on its own before its root did: run forward through the root "
             "module first");
  });
}

TEST(FullyShardInit, test_fully_shard_multi_module_root) {
  run_ranks(1, [](const ProcessGroupPtr& world) {
    Mlps model(2);
    torch::nn::Module* const list[] = {model.mlps[0].get(), model.mlps[1].get()};
    fully_shard(list, {.mesh = flat_mesh(world)});
    contains(message_of([&] { model.forward(fixed({4, 5}, 1)); }), "the root of fully_shard must be one module");
  });
}

TEST(FullyShardInit, test_reset_sharded_param_in_lazy_init) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Mlps model(1);
    fully_shard(model, {.mesh = flat_mesh(world)});
    MlpsImpl plain(1);
    uint64_t seed = 900;  // weights other than the sharded ones: whole, or local rows
    for (const auto& item : plain.named_parameters()) {
      item.value().set_data(fixed(item.value().sizes(), ++seed));
      const at::Tensor w = model.named_parameters()[item.key()];
      w.set_data(seed % 2 == 0 ? item.value().detach().clone() : part_like(item.value(), w).clone());
    }
    const at::Tensor expected = plain.forward(fixed({4, 5}, 2)), y = model.forward(fixed({4, 5}, 2));
    EXPECT_TRUE(at::equal(y, expected));
    expected.sum().backward();
    y.sum().backward();
    expect_gradients_of(plain, model);
  });
}

TEST(FullyShardInit, test_meta_device_1d_init) {
  for (const int64_t width : {4, 5, 1}) {  // over 3 ranks: uneven rows, and ranks without any
    for (const bool half : {false, true}) {
      run_ranks(3, [=](const ProcessGroupPtr& world) {
        FullyShardOptions options{.mesh = flat_mesh(world)};
        if (half) options.mixed_precision.param_dtype = at::kBFloat16;
        Mlps model(2, width, at::kMeta);
        for (const auto& mlp : model.mlps) fully_shard(*mlp, options);
        fully_shard(model, options);
        for (const auto& w : model.parameters()) {
          EXPECT_TRUE(w.is_meta());
          materialise_empty_parameter(w, device_of_tests());  // to_empty, then reset_parameters
          const auto local = reshard_and_view(w).local;
          local.fill_(0.5);
        }
        MlpsImpl plain(2, width);
        for (const auto& w : plain.parameters()) {
          w.detach().fill_(0.5);
          if (half) w.set_data(w.detach().to(at::kBFloat16));
        }
        at::Tensor x = fixed({4, width}, 1);
        if (half) {
          x = x.to(at::kBFloat16);
          for (const auto& mlp : plain.mlps) mlp->scale.set_data(mlp->scale.to(at::kBFloat16));
        }
        // Every rank has the same input, so averaging three bf16 gradients changes nothing; fp32 ones may differ from
        // the plain model's in the last bit.
        model.forward(x).sum().backward();
        plain.forward(x).sum().backward();
        const auto expected = plain.named_parameters();
        for (const auto& item : model.named_parameters()) {
          const at::Tensor whole = expected[item.key()].grad().to(at::kFloat);
          const at::Tensor part = part_like(whole, item.value());
          ASSERT_EQ(item.value().grad().sizes(), part.sizes());
          if (part.numel() == 0) continue;
          EXPECT_LE((item.value().grad() - part).abs().max().item<float>(), 1e-6 * whole.abs().max().item<float>())
              << item.key();
        }
      });
    }
  }
}

TEST(FullyShardInit, test_invalid_meta_device_init) {
  run_ranks(2, [](const ProcessGroupPtr& world) {
    Mlps model(1, 5, at::kMeta);
    fully_shard(model, {.mesh = flat_mesh(world)});
    materialise_empty_parameter(model.mlps[0]->in_proj->w[0], device_of_tests());
    contains(message_of([&] {
               model.forward(fixed({4, 5}, 1));
             }),
             "still on the meta device: 0.in_proj.w1, 0.out_proj.w0, 0.out_proj.w1");
  });
}

TEST(FullyShardInit, test_rank0_broadcast_meta_device_init) {
  for (const bool replicas : {false, true}) {
    run_ranks(4, [=](const ProcessGroupPtr& world) {
      const auto mesh = replicas
                            ? std::make_shared<DeviceMesh>(world, std::vector<int>{2, 2}, Names{"replicate", "shard"})
                            : flat_mesh(world);
      Mlps direct(2);
      Mlps model(2, 5, at::kMeta);
      for (Mlps* each : {&direct, &model}) {
        for (const auto& mlp : each->mlps) fully_shard(*mlp, {.mesh = mesh});
        fully_shard(*each, {.mesh = mesh});
      }
      const MlpsImpl on_rank_0(2);
      for (const auto& item : on_rank_0.named_parameters()) {
        at::Tensor whole = world->rank() == 0 ? item.value().detach().clone() : at::empty(item.value().sizes());
        world->broadcast(whole, 0).wait();
        assign_full_parameter(model.named_parameters()[item.key()], whole);
      }
      for (Mlps* each : {&direct, &model})
        each->forward(fixed({4, 5}, static_cast<uint64_t>(world->rank()))).sum().backward();
      const auto expected = direct.named_parameters();
      for (const auto& item : model.named_parameters())
        EXPECT_TRUE(at::equal(item.value().grad(), expected[item.key()].grad())) << item.key();
    });
  }
}

/// Three steps of the same model on both meshes, bit-identical.
void expect_equal_training(const DeviceMeshPtr& mesh, const DeviceMeshPtr& from_groups) {
  Mlps reference(2), model(2);
  for (const auto& mlp : reference.mlps) fully_shard(*mlp, {.mesh = mesh});
  fully_shard(reference, {.mesh = mesh});
  for (const auto& mlp : model.mlps) fully_shard(*mlp, {.mesh = from_groups});
  fully_shard(model, {.mesh = from_groups});
  for (uint64_t step = 0; step < 3; ++step) {
    std::vector<at::Tensor> losses;
    for (Mlps* each : {&reference, &model}) {
      each->zero_grad();
      losses.push_back(each->forward(fixed({4, 5}, step)).pow(2).mean());
      losses.back().backward();
      descend(*each);
    }
    EXPECT_TRUE(at::equal(losses[0], losses[1]));
  }
  const auto expected = reference.named_parameters();
  for (const auto& item : model.named_parameters()) {
    EXPECT_TRUE(at::equal(reshard_and_view(item.value()).local, reshard_and_view(expected[item.key()]).local))
        << item.key();
  }
}

TEST(FullyShardInit, test_1d_process_group_init) {
  run_ranks(4, [](const ProcessGroupPtr& world) {
    expect_equal_training(flat_mesh(world), std::make_shared<DeviceMesh>(std::vector<ProcessGroupPtr>{world}, Names{}));
  });
}

TEST(FullyShardInit, test_2d_process_group_init) {
  run_ranks(4, [](const ProcessGroupPtr& world) {
    const int rank = world->rank(), pair = rank / 2 * 2;
    const auto shard = world->subgroup({pair, pair + 1}, "my shard");
    const auto replicate = world->subgroup({rank % 2, rank % 2 + 2}, "my replicate");
    const Names names{"replicate", "shard"};
    expect_equal_training(std::make_shared<DeviceMesh>(world, std::vector<int>{2, 2}, names),
                          std::make_shared<DeviceMesh>(std::vector<ProcessGroupPtr>{replicate, shard}, names));
  });
}

TEST(FullyShardInit, test_hsdp_broadcast_across_replicas) {
  run_ranks(4, [](const ProcessGroupPtr& world) {
    const auto mesh = std::make_shared<DeviceMesh>(world, std::vector<int>{2, 2}, Names{"replicate", "shard"});
    // Replicas start with different weights until rank 0 of the replicate dimension broadcasts its rows.
    Formula unit({{5, 6}, {5}}, MlpImpl::biased, at::kFloat, static_cast<uint64_t>(100 * mesh->coordinate(0)));
    FormulaImpl plain({{5, 6}, {5}}, MlpImpl::biased, at::kFloat, 0);
    fully_shard(unit, {.mesh = mesh});
    for (const auto& w : unit.w) mesh->group("replicate")->broadcast(reshard_and_view(w).local, 0).wait();
    expect_weights_of(plain, unit);
    for (uint64_t step = 0; step < 2; ++step) {
      const at::Tensor x = fixed({4, 6}, 10 * step + static_cast<uint64_t>(world->rank()));
      plain.zero_grad();
      unit.zero_grad();
      plain.forward(x).pow(2).sum().backward();
      unit.forward(x).pow(2).sum().backward();
      average_gradients(plain, *world);
      expect_gradients_of(plain, unit, 1e-6);  // averaged in two steps: different order of additions
      descend(plain);
      descend(unit);
    }
  });
}

}  // namespace
}  // namespace megashard::testing
