#include "framework/data/build_datasets.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <functional>
#include <utility>

#include "framework/arguments/argument_value.h"
#include "framework/data/conversation_dataset.h"
#include "framework/data/data_formats.h"
#include "framework/data/gpt_dataset.h"
#include "framework/data/indexed_dataset.h"
#include "framework/data/mock_tokens.h"
#include "framework/data/sample_dataset.h"
#include "framework/diagnostics.h"

namespace megashard {
namespace {

constexpr size_t kSplits = 3;
constexpr std::array<const char*, kSplits> kSplitNames = {"train", "valid", "test"};
// Fraction of extra samples that Megatron builds for each member of a weighted blend.
constexpr double kSurplus = 0.005;

using Sizes = std::array<std::optional<int64_t>, kSplits>;
using Datasets = std::array<std::shared_ptr<const SampleDataset>, kSplits>;

bool wanted(const std::optional<int64_t>& size) { return !size.has_value() || *size != 0; }

std::string stripped(const std::string& text) {
  const char* spaces = " \t\n\r";
  const size_t begin = text.find_first_not_of(spaces);
  return begin == std::string::npos ? "" : text.substr(begin, text.find_last_not_of(spaces) - begin + 1);
}

// Python's round: half to even, the default rounding mode of nearbyint.
int64_t split_bound(double fraction, size_t sequences) {
  return static_cast<int64_t>(std::nearbyint(fraction * static_cast<double>(sequences)));
}

bool has_documents(const SplitShare& share, size_t count) {
  return split_bound(share.begin, count) < split_bound(share.end, count);
}

// The remedy for a --split that gives a split none of the `count` documents.
std::string better_split(size_t count) {
  const std::string all = "--split 100,0,0 to train on all of them and evaluate on none";
  for (const char* split : {"98,1,1", "90,5,5", "80,10,10", "34,33,33"}) {
    const SplitShares shares = parse_split(split);
    const bool each =
        std::all_of(shares.begin(), shares.end(), [count](const auto& share) { return has_documents(*share, count); });
    if (each) return "--split " + std::string(split) + ", which leaves each split some, or " + all;
  }
  return all;
}

void check_shares(const std::string& name, size_t count, const SplitShares& shares, const Sizes& sizes,
                  const DataOptions& options) {
  std::string split = options.split;
  std::erase(split, ' ');
  for (size_t i = 0; i < kSplits; ++i) {
    const bool lacks = shares[i].has_value() && wanted(sizes[i]) && !has_documents(*shares[i], count);
    require(!lacks, "--split " + split + " leaves the " + kSplitNames[i] + " split no document of \"" + name +
                        "\", which has " + std::to_string(count) + "; give " + better_split(count));
  }
}

// Token files have two bytes a token if the tokenizer has fewer tokens than this.
constexpr int64_t kShortTokens = 65500;
constexpr int64_t kMaxPadded = 65536;  // size of such a vocabulary after padding

DataSource open_tokens(const std::string& prefix, const DataOptions& options) {
  auto set = std::make_shared<IndexedDataset>(prefix);
  if (options.sink && options.vocab_size > kMaxPadded && token_bytes(set->token_type()) <= 2) {
    options.sink(Severity::kWarning, "data set \"" + prefix +
                                         "\" has tokens of two bytes, so its tokenizer has less than " +
                                         std::to_string(kShortTokens) + " of them, but the model has a vocabulary of " +
                                         std::to_string(options.vocab_size) +
                                         ": tokenise the text with the model's own tokenizer, unless this is it");
  }
  return source_of(std::move(set));
}

DataSource open_conversations(const std::string& prefix, const DataOptions& /*options*/) {
  const auto set = std::make_shared<ConversationSet>(prefix);
  return {prefix, static_cast<size_t>(set->size()),
          [set](const SplitOptions& split) { return std::make_shared<ConversationDataset>(set, split); }};
}

DataSource open_latents(const std::string& prefix, const DataOptions& options) {
  const auto set = std::make_shared<LatentSet>(prefix);
  return {prefix, static_cast<size_t>(set->size()), [set, latents = *options.latents](const SplitOptions& split) {
            return std::make_shared<LatentDataset>(set, split, latents);
          }};
}

/// A format of the program's own and the file extension that identifies it. If no file of a prefix has one, or that of
/// a registered format, open_tokens reports what is missing.
struct OwnFormat {
  const char* extension;
  DataSource (*open)(const std::string& prefix, const DataOptions& options);
};
constexpr OwnFormat kOwnFormats[] = {
    {kConversationsSuffix, open_conversations},
    {kLatentsFile, open_latents},
    {".idx", open_tokens},
};

DataSource open_source(const std::string& prefix, const DataOptions& options) {
  std::vector<std::string> found;  // extensions
  std::function<DataSource()> open = [&] { return open_tokens(prefix, options); };
  const auto look_for = [&](const std::string& extension, std::function<DataSource()> opens) {
    if (!std::filesystem::exists(prefix + extension)) return;
    found.push_back(extension);
    open = std::move(opens);
  };
  for (const OwnFormat& format : kOwnFormats) look_for(format.extension, [&] { return format.open(prefix, options); });
  for (const DataFormat& format : data_formats()) look_for(format.extension, [&] { return format.open(prefix); });
  if (found.size() > 1)
    throw UsageError(prefix + found[0] + " and " + prefix + found[1] +
                     " are two data sets of one prefix; rename the one that is not meant");
  const bool has_latents = !found.empty() && found[0] == kLatentsFile;
  require(has_latents || !options.latents, prefix + kLatentsFile +
                                               " does not exist, and the model takes latents; give a folder that "
                                               "launch/preprocess/preprocess_latents.py has written.");
  require(!has_latents || options.latents,
          prefix + " has latents, and the model takes tokens; give it a set of tokens, or a model of latents.");
  return open();
}

Datasets build_splits(const DataSource& source, const SplitShares& shares, const Sizes& sizes,
                      const DataOptions& options) {
  check_shares(source.name, source.count, shares, sizes, options);
  Datasets built;
  for (size_t i = 0; i < kSplits; ++i) {
    if (!shares[i].has_value() || !wanted(sizes[i])) continue;
    built[i] = source.dataset({.split_name = kSplitNames[i],
                               .first = split_bound(shares[i]->begin, source.count) / options.group * options.group,
                               .last = split_bound(shares[i]->end, source.count) / options.group * options.group,
                               .seq_length = options.seq_length,
                               .seed = options.seed,
                               .shuffles = options.shuffle_conversations,
                               .packs = options.neat_packing,
                               .group = options.group,
                               .last_tokens = options.last_tokens,
                               .num_samples = sizes[i]});
  }
  return built;
}

int64_t share_of(int64_t size, double weight) {
  return static_cast<int64_t>(std::ceil(static_cast<double>(size) * weight));
}

// Numbers of samples that one member of a blend needs: one epoch without weights, else its share plus kSurplus.
Sizes member_sizes(const Sizes& sizes, const std::vector<double>& weights, size_t member) {
  Sizes result;
  for (size_t i = 0; i < kSplits; ++i) {
    if (!wanted(sizes[i])) {
      result[i] = 0;
    } else if (!weights.empty()) {
      TORCH_CHECK(sizes[i].has_value(), "a blend with weights needs a number of ", kSplitNames[i],
                  " samples; leave the weights out to use every document once");
      const auto share = static_cast<double>(share_of(*sizes[i], weights[member]));
      result[i] = static_cast<int64_t>(std::ceil(share * (1 + kSurplus)));
    }
  }
  return result;
}

std::shared_ptr<const SampleDataset> blend_split(std::vector<std::shared_ptr<const SampleDataset>> members,
                                                 std::vector<double> weights, std::optional<int64_t> size,
                                                 const char* split_name) {
  if (!weights.empty()) {
    int64_t total = 0;
    for (double weight : weights) total += share_of(*size, weight);
    size = total;
  } else {
    int64_t total = 0;
    for (const auto& member : members) {
      total += member->size();
      weights.push_back(static_cast<double>(member->size()));
    }
    if (size.has_value()) size = std::min(*size, total);
  }
  return std::make_shared<BlendedDataset>(std::move(members), std::move(weights), size, split_name);
}

Datasets build_blend(const Blend& blend, const SplitShares& shares, const Sizes& sizes, const DataOptions& options) {
  const auto weights = blend.weights.empty() ? blend.weights : normalized(blend.weights);
  std::array<std::vector<std::shared_ptr<const SampleDataset>>, kSplits> members;
  for (size_t k = 0; k < blend.prefixes.size(); ++k) {
    const DataSource source = open_source(blend.prefixes[k], options);
    auto built = build_splits(source, shares, member_sizes(sizes, weights, k), options);
    for (size_t i = 0; i < kSplits; ++i)
      if (built[i] != nullptr) members[i].push_back(std::move(built[i]));
  }
  Datasets blended;
  for (size_t i = 0; i < kSplits; ++i)
    if (!members[i].empty()) blended[i] = blend_split(std::move(members[i]), weights, sizes[i], kSplitNames[i]);
  return blended;
}

Datasets build_from_one_path(const SplitShares& shares, const Sizes& sizes, const DataOptions& options) {
  const Blend blend = parse_blend(options.data_path);
  if (blend.prefixes.size() == 1 && blend.weights.empty())
    return build_splits(open_source(blend.prefixes[0], options), shares, sizes, options);
  return build_blend(blend, shares, sizes, options);
}

Datasets build_per_split(const Sizes& sizes, const DataOptions& options) {
  const std::array<const std::vector<std::string>*, kSplits> paths = {
      &options.train_data_path, &options.valid_data_path, &options.test_data_path};
  Datasets built;
  for (size_t i = 0; i < kSplits; ++i) {
    if (paths[i]->empty()) continue;
    const Blend blend = parse_blend(*paths[i]);
    SplitShares shares;
    shares[i] = SplitShare{};
    if (blend.prefixes.size() == 1)
      built[i] = build_splits(open_source(blend.prefixes[0], options), shares, sizes, options)[i];
    else
      built[i] = build_blend(blend, shares, sizes, options)[i];
  }
  return built;
}

bool has_conversations(const SampleDataset& dataset) {
  DatasetFacts facts;
  dataset.add_facts(dataset.size(), facts);
  return facts.units.contains("conversation");
}

void check_groups(const SampleDataset& dataset, const DataOptions& options) {
  if (options.group == 1) return;
  const bool is_one_set = dynamic_cast<const ConversationDataset*>(&dataset) != nullptr;
  require(is_one_set,
          "this --objective compares neighbouring conversations: give one set of conversations to each split, without "
          "weights");
}

void check_has_conversations(const SampleDataset& dataset, const std::string& split_name) {
  require(has_conversations(dataset),
          "--neat-packing packs conversations, and the " + split_name +
              " data are documents, which fill their samples anyway; leave it out, and give --reset-attention-mask and "
              "--reset-position-ids to keep documents apart");
}

}  // namespace

SplitShares parse_split(const std::string& split) {
  const auto weights = normalized(parse_split_weights(split));
  SplitShares shares;
  double begin = 0;
  for (size_t i = 0; i < kSplits; ++i) {
    const double end = begin + weights[i];
    if (end > begin) shares[i] = SplitShare{.begin = begin, .end = end};
    begin = end;
  }
  return shares;
}

Blend parse_blend(const std::vector<std::string>& words) {
  Blend blend;
  size_t numbers = 0;
  for (size_t i = 0; words.size() % 2 == 0 && i < words.size(); i += 2)
    numbers += parse_number(words[i]).has_value() ? 1 : 0;
  require(numbers == 0 || numbers == words.size() / 2, "the data path has weights for " + std::to_string(numbers) +
                                                           " of " + std::to_string(words.size() / 2) +
                                                           " data sets; give WEIGHT PREFIX pairs, or prefixes alone");
  for (size_t i = 0; i < words.size(); ++i) {
    if (numbers > 0 && i % 2 == 0) {
      const double weight = *parse_number(words[i]);
      require(weight > 0 && std::isfinite(weight), "the weight " + words[i] + " of data set \"" + words[i + 1] +
                                                       "\" is not positive; leave a data set out instead");
      blend.weights.push_back(weight);
    } else {
      blend.prefixes.push_back(stripped(words[i]));
    }
  }
  return blend;
}

DataSplits build_datasets(const DataOptions& options) {
  const bool per_split =
      !options.train_data_path.empty() || !options.valid_data_path.empty() || !options.test_data_path.empty();
  const int sources = (options.data_path.empty() ? 0 : 1) + (per_split ? 1 : 0) + (options.mock_data ? 1 : 0);
  TORCH_CHECK(sources == 1,
              "training data must come from one of --data-path, --train-data-path (with --valid-data-path, "
              "--test-data-path) and --mock-data, got ",
              sources, " of them");
  const Sizes sizes = {options.train_samples, options.valid_samples, options.test_samples};
  Datasets built;
  if (options.mock_data) {
    require(!options.latents, "--mock-data are tokens, and the model takes latents; give --data-path.");
    const int64_t end = options.eod_id < 0 ? options.vocab_size - 1 : options.eod_id;
    const auto source = std::make_shared<MockTokens>(options.vocab_size, end);
    built = build_splits(source_of(source), parse_split("1,1,1"), sizes, options);
  } else if (per_split) {
    built = build_per_split(sizes, options);
  } else {
    built = build_from_one_path(parse_split(options.split), sizes, options);
  }
  require(built[0] != nullptr || !wanted(sizes[0]),
          per_split ? "there is no training data: --train-data-path is missing; give it"
                    : "there is no training data: --split " + options.split +
                          " gives the train split a weight of 0; give it a share, as in "
                          "--split 100,0,0");
  for (const auto& split : built)
    if (split != nullptr) check_groups(*split, options);
  for (size_t i = 0; i < kSplits && options.neat_packing; ++i)
    if (built[i] != nullptr) check_has_conversations(*built[i], kSplitNames[i]);
  return {.train = built[0], .valid = built[1], .test = built[2]};
}

}  // namespace megashard
