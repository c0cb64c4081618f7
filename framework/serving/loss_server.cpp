#include "framework/serving/loss_server.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <iomanip>
#include <optional>
#include <utility>

#include "checkpoint/steps/find_step.h"
#include "parallel/collectives/agreement.h"
#include "parallel/collectives/wait_error.h"

namespace megashard {
namespace {

constexpr const char* kCommand = "command";
constexpr const char* kStop = "stop";
constexpr std::array kCommands = {"forward", "forward_backward", "backward", "step", "zero_grad", "save",
                                  "load",    "save_weights",     kStop};
constexpr char kAccepted = '+', kRefused = '-', kWaits = '.';
constexpr std::chrono::milliseconds kLookFor{200};  // so soon all ranks know that a client is gone

std::string exact_text(double number) { return c10::str(std::setprecision(17), number); }

Message refusal(const std::string& why) { return {.fields = {{"error", why}}, .tensors = {}}; }

/// Returns the part of a request that all clients must have alike.
std::string summary_of(const Message& request) {
  std::string text = request.word(kCommand);
  for (const auto& [name, word] : request.fields) {
    if (name != kCommand) text += " " + name + "=" + word;
  }
  for (const auto& [name, tensor] : request.tensors) text += " " + name;
  return text;
}

/// Returns why the ranks do not carry out their requests; empty if they do. Ranks that do not listen have no words.
std::string refusal_of(const std::vector<std::string>& of_ranks) {
  std::optional<size_t> first;
  for (size_t rank = 0; rank < of_ranks.size(); ++rank) {
    const std::string& words = of_ranks[rank];
    if (words.empty()) continue;
    if (words[0] == kRefused)
      return c10::str(of_ranks.size() > 1 ? c10::str("rank ", rank, ": ") : "", words.substr(1));
    if (!first) {
      first = rank;
    } else if (words != of_ranks[*first]) {
      return c10::str("the clients ask for different things: that of rank ", *first, " for \"",
                      of_ranks[*first].substr(1), "\", that of rank ", rank, " for \"", words.substr(1),
                      "\"; each sends the same commands in the same order");
    }
  }
  return "";
}

}  // namespace

LossServer::LossServer(LossServerOptions options, ServedModel& model, TrainingState& state, Arguments& arguments,
                       ProcessGroupPtr world, ProcessGroupPtr sharing)
    : options_(std::move(options)),
      model_(model),
      state_(state),
      arguments_(arguments),
      world_(std::move(world)),
      sharing_(std::move(sharing)) {
  all_or_rethrow(world_, [this] {
    if (rank_in(sharing_) != 0) return;
    socket_ =
        std::make_unique<MessageSocket>(c10::str(options_.socket, ".", options_.data_parallel_rank), options_.timeout);
  });
}

Message LossServer::hello() const {
  return {.fields = {{"data_parallel_rank", std::to_string(options_.data_parallel_rank)},
                     {"data_parallel_size", std::to_string(options_.data_parallel_size)},
                     {"vocab_size", std::to_string(options_.rows.vocab_size)},
                     {"seq_length", std::to_string(options_.rows.seq_length)},
                     {"step", std::to_string(state_.progress.step)},
                     {"lr", exact_text(state_.schedule->lr())}},
          .tensors = {}};
}

std::string LossServer::exchange() {
  if (std::exchange(has_reply_, false)) socket_->send(encode_message(reply_));
  while (found_.empty()) {
    auto bytes = socket_->receive(kLookFor);
    if (!bytes) return {kWaits};
    bytes_ = std::move(*bytes);
    request_ = decode_message(bytes_, "a request at " + socket_->path());
    if (request_.word(kCommand) == "hello") {
      socket_->send(encode_message(hello()));
    } else {
      found_ = summary_or_refusal();
    }
  }
  return found_;
}

std::string LossServer::summary_or_refusal() const {
  try {
    const std::string command = request_.word(kCommand);
    TORCH_CHECK_VALUE(std::ranges::count(kCommands, command) > 0, "there is no command \"", command, "\"; known are ",
                      c10::Join(", ", std::vector<std::string>(kCommands.begin(), kCommands.end())));
    if (command.starts_with("forward") || command == "backward" || command == "step") model_.check(request_);
    if (command == "step") request_.number("lr", 0);
    TORCH_CHECK_VALUE(!(command.starts_with("save") || command == "load") || !request_.word("folder").empty(), command,
                      " needs the field \"folder\"");
    return kAccepted + summary_of(request_);
  } catch (const c10::ValueError& error) {
    return kRefused + error_text(error);
  }
}

void LossServer::share_request() {
  if (size_in(sharing_) == 1) return;
  const auto on_device = at::TensorOptions(sharing_->device());
  at::Tensor size = at::empty({1}, on_device.dtype(at::kLong)).fill_(static_cast<int64_t>(bytes_.size()));
  sharing_->broadcast(size, 0).wait();
  at::Tensor data = at::empty({size.item<int64_t>()}, at::TensorOptions(at::kByte));
  if (listens()) std::memcpy(data.mutable_data_ptr(), bytes_.data(), bytes_.size());
  data = data.to(sharing_->device());
  sharing_->broadcast(data, 0).wait();
  if (listens()) return;
  data = data.cpu();
  request_ = decode_message({static_cast<const char*>(data.const_data_ptr()), static_cast<size_t>(data.numel())},
                            "a shared request");
}

void LossServer::run() {
  const TrainingRun run{.model = model_.model(),
                        .optimizer = *state_.optimizer,
                        .world = world_,
                        .device = state_.device,
                        .step = state_.progress.step,
                        .print = options_.print,
                        .arguments = ArgumentView(arguments_)};
  for (const auto& each : options_.listeners) each->training_starts(run);
  std::string where = options_.socket + ".0";
  if (options_.data_parallel_size > 1) where += c10::str(" to ", options_.socket, ".", options_.data_parallel_size - 1);
  options_.print("serving at " + where);
  for (std::string command; command != kStop;) {
    enter_phase("wait for clients after step", state_.progress.step);
    const auto of_ranks = gather_or_throw(world_, [this] { return listens() ? exchange() : std::string(); });
    if (std::ranges::any_of(of_ranks, [](const std::string& words) { return words.starts_with(kWaits); })) continue;
    found_.clear();
    has_reply_ = listens();
    if (const std::string why = refusal_of(of_ranks); !why.empty()) {
      reply_ = refusal(why);
      continue;
    }
    share_request();
    command = request_.word(kCommand);
    enter_phase("training step", state_.progress.step + 1);
    reply_ = carry_out(command);
  }
  all_or_throw(world_, [this] {
    if (listens()) socket_->send(encode_message(reply_));
  });
  for (const auto& each : options_.listeners) each->steps_ended(state_.progress.step);
}

Message LossServer::carry_out(const std::string& command) {
  if (command.starts_with("forward")) return model_.forward(request_);
  if (command == "backward") return model_.backward(request_);
  if (command == "step") return step();
  if (command == "zero_grad") model_.zero_grad();
  if (command.starts_with("save")) return save();
  if (command == "load") return load();
  return {};
}

Message LossServer::step() {
  const int64_t step = state_.progress.step + 1;
  const DeviceStats stats = model_.clip();
  const double lr = request_.number("lr", state_.schedule->lr());
  state_.optimizer->set_lr(lr);
  state_.optimizer->set_weight_decay(state_.schedule->weight_decay());
  for (const auto& each : options_.listeners) each->gradients_ready(step);
  model_.update();
  const double norm = stats.grad_norm.item<double>();
  const bool is_skipped = !std::isfinite(norm);
  state_.progress.step = step;
  state_.progress.samples += options_.samples_of_step;
  if (!is_skipped || state_.scaler == nullptr) state_.schedule->advance(options_.samples_of_step);
  for (const auto& each : options_.listeners) each->weights_updated(step);
  if (step % arguments_.log_interval == 0)
    options_.print(c10::str("step ", step, ": gradient norm ", norm, ", learning rate ", lr,
                            is_skipped ? "; the gradients are not finite, so no weight has changed" : ""));
  return {.fields = {{"step", std::to_string(step)},
                     {"grad_norm", exact_text(norm)},
                     {"lr", exact_text(lr)},
                     {"next_lr", exact_text(state_.schedule->lr())},
                     {"skipped", is_skipped ? "true" : "false"}},
          .tensors = {}};
}

Message LossServer::save() {
  const std::string folder = request_.word("folder");
  try {
    if (request_.word(kCommand) == "save_weights") {
      options_.save_weights(folder, request_.is_set("adapters"));
      return {};
    }
    arguments_.save = folder;
    save_training_checkpoint(state_, world_, [this](const std::string& line) { options_.print(line); });
    return {};
  } catch (const c10::DistError&) {
    throw;  // ranks are lost
  } catch (const std::exception& error) {
    return refusal(error_text(error));
  }
}

Message LossServer::load() {
  const std::string folder = request_.word("folder");
  const auto found = find_step(folder, world_);
  if (!found) return refusal(folder + " holds no checkpoint of a training");
  model_.zero_grad();
  for (const auto& line : load_training_checkpoint(state_, *found, world_)) options_.print(line);
  return {.fields = {{"step", std::to_string(state_.progress.step)}}, .tensors = {}};
}

}  // namespace megashard
