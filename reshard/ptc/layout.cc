#include "reshard/ptc/layout.h"

#include <algorithm>
#include <boost/json/serialize.hpp>
#include <charconv>
#include <optional>

#include "reshard/ptc/pipeline_layout.h"
#include "reshard/ptc/rule_set.h"
#include "store/base/json_settings.h"
#include "store/base/utf8.h"

namespace ptc {
namespace {

constexpr std::string_view kLayoutFormat = "ptc-layout/1";
constexpr size_t kMaxLayoutBytes = 500 << 10;  // its text, escaped, is one value of the metadata
constexpr uint64_t kMaxDeviceIndex = 9999;

// Persisted in the names of layouts: they never change.
constexpr std::string_view kNamingPart = "-naming_", kOrderPart = "-order_", kOverPart = "-over_",
                           kRulesPart = "-rules_";
constexpr size_t kIdDigits = 8;

const std::vector<std::string> kKeys = {"format", "tp",       "pp",        "dp",       "ep",
                                        "etp",    "cp",       "vpp",       "order",    "devices",
                                        "stages", "naming",   "optimizer", "dp_shard", "shard_over",
                                        "rules",  "replicas", "keep",      "memory"};

std::string_view naming_name(Naming naming) {
  return naming == Naming::kStage ? "stage" : "global";
}
std::string_view optimizer_name(OptimizerCut cut) {
  switch (cut) {
    case OptimizerCut::kZero1:
      return "zero1";
    case OptimizerCut::kFsdp:
      return "fsdp";
    case OptimizerCut::kReplicated:
      break;
  }
  return "replicated";
}
std::optional<Naming> parse_naming(std::string_view text) {
  for (Naming value : {Naming::kGlobal, Naming::kStage}) {
    if (naming_name(value) == text) return value;
  }
  return std::nullopt;
}
std::optional<OptimizerCut> parse_optimizer(std::string_view text) {
  for (OptimizerCut value :
       {OptimizerCut::kReplicated, OptimizerCut::kZero1, OptimizerCut::kFsdp}) {
    if (optimizer_name(value) == text) return value;
  }
  return std::nullopt;
}

/// Persisted in the names of layouts: never changes.
uint32_t name_hash(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return static_cast<uint32_t>(hash ^ (hash >> 32));
}

bool fits_world_size(const ParallelConfig& sizes) {
  uint64_t product = 1;
  for (uint64_t size : {sizes.expert_tp(), sizes.pp, sizes.dp, sizes.ep, sizes.cp}) {
    product *= size;
    if (product > kMaxWorldSize) return false;
  }
  return true;
}

std::string too_many_ranks() {
  return fmt::format("the sizes make more than {} ranks", kMaxWorldSize);
}

/// What keeps stages from having several stretches of layers; nullopt: nothing.
std::optional<std::string> why_no_chunks(const LayoutSpec& spec) {
  if (spec.vpp == 1) return std::nullopt;
  if (spec.sizes.pp == 1)
    return fmt::format(
        "'vpp' is {}, and of one stage there are no stretches: pp must be more than 1", spec.vpp);
  if (uint64_t{spec.sizes.pp} * spec.vpp > kMaxWorldSize)
    return fmt::format("pp and vpp make more than {} stretches of layers", kMaxWorldSize);
  if (spec.naming == Naming::kStage)
    return "'naming' is \"stage\", and a stage with several stretches of layers ('vpp') has no "
           "numbers of its own";
  return std::nullopt;
}

/// What keeps experts from being cut by an etp of their own; nullopt: nothing.
std::optional<std::string> why_no_etp(const LayoutSpec& spec) {
  const ParallelConfig& sizes = spec.sizes;
  if (sizes.etp == 0) return std::nullopt;
  const uint64_t of_stage = sizes.world_size() / sizes.pp;
  if (of_stage % (uint64_t{sizes.tp} * sizes.cp) != 0)
    return fmt::format(
        "'etp' is {}, so that a stage has etp·ep·dp·cp = {} ranks, which tp{} = {} does not divide",
        sizes.etp, of_stage, sizes.cp > 1 ? "·cp" : "", uint64_t{sizes.tp} * sizes.cp);
  if (spec.order != RankOrder())
    return "with 'etp' ranks are numbered as Megatron-Core does, and 'order' must be "
           "\"tp-cp-ep-dp-pp\"";
  if (spec.optimizer != OptimizerCut::kReplicated && sizes.etp * sizes.ep % sizes.tp != 0)
    return fmt::format(
        "'optimizer' cuts state over dp, and with 'etp' it can where tp divides etp·ep: {} does "
        "not divide {}",
        sizes.tp, sizes.etp * sizes.ep);
  return std::nullopt;
}

/// What keeps state from being cut among so few dp ranks; nullopt: nothing.
std::optional<std::string> why_no_shards(const LayoutSpec& spec) {
  if (spec.dp_shard == 0) return std::nullopt;
  if (spec.optimizer == OptimizerCut::kReplicated)
    return "'dp_shard' says among how many data-parallel ranks state is cut, and 'optimizer' "
           "cuts none: it must be \"zero1\" or \"fsdp\"";
  if (spec.sizes.dp % spec.dp_shard != 0)
    return fmt::format("'dp_shard' is {}, which does not divide dp = {}", spec.dp_shard,
                       spec.sizes.dp);
  return std::nullopt;
}

/// What keeps state that is cut over dp from being cut over other ranks too; nullopt: nothing.
std::optional<std::string> why_not_over(const LayoutSpec& spec) {
  if (!spec.shard_cp && !spec.shard_ep) return std::nullopt;
  if (spec.optimizer == OptimizerCut::kReplicated)
    return "'shard_over' says over which ranks state is cut beside data-parallel ones, and "
           "'optimizer' cuts none: it must be \"zero1\" or \"fsdp\"";
  for (const auto& [over, size] : {std::pair(spec.shard_cp, "cp"), {spec.shard_ep, "ep"}})
    if (over && spec.dp_shard != 0 && !spec.order.is_before(size, "dp"))
      return fmt::format(
          "'dp_shard' has neighbouring ranks share state, and with 'shard_over' {} must stand "
          "before dp in 'order', which is \"{}\"",
          size, spec.order.to_string());
  return std::nullopt;
}

/// Of 'shard_over', what changes nothing.
bool is_over_one_rank(const LayoutSpec& spec) {
  return (spec.shard_cp && spec.sizes.cp == 1) || (spec.shard_ep && spec.ep_copies() == 1);
}

/// "cp", "cp_ep"
std::string shard_over(const LayoutSpec& spec) {
  return fmt::format("{}{}{}", spec.shard_cp ? "cp" : "", spec.shard_cp && spec.shard_ep ? "_" : "",
                     spec.shard_ep ? "ep" : "");
}

bool is_id(std::string_view text) {
  return text.size() == kIdDigits &&
         text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

/// Numbers of layers, and lists where something else is named.
json::array stages_to_json(const LayoutSpec& spec) {
  json::array list;
  for (uint32_t i = 0; i < spec.stages.size(); ++i) {
    json::array parts;
    if (spec.embedding_at == i) parts.push_back("embedding");
    if (spec.stages[i] > 0) parts.push_back(spec.stages[i]);
    if (spec.mtp_chunk() == i) parts.insert(parts.end(), spec.mtp_layers, "mtp");
    if (spec.head_at == i) parts.push_back("head");
    const bool number = parts.empty() || (parts.size() == 1 && parts[0].is_number());
    if (number) list.push_back(spec.stages[i]);
    else list.push_back(std::move(parts));
  }
  return list;
}

std::string count_differs(const LayoutSpec& spec, size_t count) {
  if (spec.vpp == 1)
    return fmt::format("'stages' has {} entries, but pp is {}", count, spec.sizes.pp);
  return fmt::format("'stages' has {} entries, but pp·vpp is {}", count, spec.chunks());
}

/// "node:index"
bool is_device(std::string_view text) {
  const size_t colon = text.rfind(':');
  if (colon == std::string_view::npos || colon == 0) return false;
  const std::string_view node = text.substr(0, colon);
  const std::string_view index = text.substr(colon + 1);
  const bool plain = std::all_of(node.begin(), node.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
           c == '-' || c == '_';
  });
  if (!plain || index.empty() || (index.size() > 1 && index[0] == '0')) return false;
  uint64_t number = 0;
  auto [end, error] = std::from_chars(index.data(), index.data() + index.size(), number);
  return error == std::errc() && end == index.data() + index.size() && number <= kMaxDeviceIndex;
}

/// Reads layout.json; every error has its place.
class LayoutParser : JsonSettings {
 public:
  LayoutParser(std::string_view text, const json::object& object) : JsonSettings(text, object) {}

  Result<Layout> parse() {
    PTC_TRY(check_keys(kKeys));
    Layout layout;
    LayoutSpec& spec = layout.spec;
    ParallelConfig& sizes = spec.sizes;
    PTC_TRY(size("tp", true, sizes.tp));
    PTC_TRY(size("pp", true, sizes.pp));
    PTC_TRY(size("dp", true, sizes.dp));
    PTC_TRY(size("ep", false, sizes.ep));
    if (object_.contains("etp")) {
      PTC_TRY(size("etp", false, sizes.etp));
    }
    if (sizes.etp == sizes.tp) sizes.etp = 0;
    PTC_TRY(size("cp", false, sizes.cp));
    if (!fits_world_size(sizes)) {
      return error({"tp"}, too_many_ranks());
    }
    PTC_TRY(words(spec));
    if (const auto why = why_no_etp(spec)) return error({"etp"}, *why);
    PTC_TRY(dp_shard(spec));
    PTC_TRY(shard_over(spec));
    PTC_TRY(size("vpp", false, spec.vpp));
    if (const auto why = why_no_chunks(spec)) return error({"vpp"}, *why);
    PTC_TRY(stages(spec));
    PTC_TRY(devices(layout));
    PTC_TRY(number("replicas", 0, kMaxReplicas, layout.replicas));
    PTC_TRY(number("keep", 0, UINT32_MAX, layout.keep));
    PTC_TRY(memory(layout));
    PTC_TRY(rules(layout));
    return layout;
  }

 private:
  Result<> size(const std::string& key, bool required, uint32_t& target) const {
    if (required && !object_.contains(key)) {
      return error({}, fmt::format("'{}' is missing: tp, pp and dp are required", key));
    }
    return number(key, 1, kMaxWorldSize, target);
  }

  Result<> words(LayoutSpec& spec) const {
    PTC_TRY(const auto format, word("format"));
    if (format && *format != kLayoutFormat) {
      return error({"format"}, fmt::format("'format' must be \"{}\"", kLayoutFormat));
    }
    PTC_TRY(const auto order, word("order"));
    if (order) {
      auto parsed = RankOrder::parse(*order);
      if (!parsed) return error({"order"}, parsed.error().message());
      spec.order = parsed.value();
    }
    PTC_TRY(const auto naming, word("naming"));
    if (naming) {
      const auto parsed = parse_naming(*naming);
      if (!parsed) return error({"naming"}, "'naming' must be \"global\" or \"stage\"");
      spec.naming = *parsed;
    }
    PTC_TRY(const auto optimizer, word("optimizer"));
    if (optimizer) {
      const auto parsed = parse_optimizer(*optimizer);
      if (!parsed) {
        return error({"optimizer"}, "'optimizer' must be \"replicated\", \"zero1\" or \"fsdp\"");
      }
      spec.optimizer = *parsed;
    }
    return ok();
  }

  Result<> memory(Layout& layout) const {
    PTC_TRY(const auto memory, word("memory"));
    if (!memory) return ok();
    if (*memory != "device" && *memory != "host")
      return error({"memory"}, "'memory' must be \"device\" or \"host\"");
    layout.in_devices = *memory == "device";
    return ok();
  }

  Result<> dp_shard(LayoutSpec& spec) const {
    if (!object_.contains("dp_shard")) return ok();
    PTC_TRY(size("dp_shard", false, spec.dp_shard));
    if (const auto why = why_no_shards(spec)) return error({"dp_shard"}, *why);
    if (spec.dp_shard == spec.sizes.dp) spec.dp_shard = 0;
    return ok();
  }

  Result<> shard_over(LayoutSpec& spec) const {
    const json::value* value = object_.if_contains("shard_over");
    if (!value) return ok();
    if (!value->is_array()) {
      return error({"shard_over"}, "'shard_over' must be a list, as [\"cp\", \"ep\"]");
    }
    const json::array& list = value->get_array();
    for (size_t i = 0; i < list.size(); ++i) {
      const std::string_view word =
          list[i].is_string() ? std::string_view(list[i].get_string()) : std::string_view();
      if (word == "cp") spec.shard_cp = true;
      else if (word == "ep") spec.shard_ep = true;
      else if (word != "dp")
        return error({"shard_over", std::to_string(i)},
                     "'shard_over' may have \"cp\" and \"ep\"; \"dp\" is always meant");
    }
    if (const auto why = why_not_over(spec)) return error({"shard_over"}, *why);
    spec.shard_cp = spec.shard_cp && spec.sizes.cp > 1;
    spec.shard_ep = spec.shard_ep && spec.ep_copies() > 1;
    return ok();
  }

  Result<> rules(Layout& layout) const {
    PTC_TRY(const auto rules, word("rules"));
    if (!rules) return ok();
    if (*rules != kRulesFile && !is_id(*rules))
      return error({"rules"}, fmt::format("'rules' must be \"{}\", or the eight digits that stand "
                                          "behind \"{}\" in the name of a layout of this job",
                                          kRulesFile, kRulesPart.substr(1)));
    layout.rules = *rules;
    return ok();
  }

  Result<> stages(LayoutSpec& spec) const {
    const json::value* value = object_.if_contains("stages");
    if (!value) return ok();
    std::vector<StageParts> parts;
    if (value->is_string()) {
      auto parsed = parse_pipeline_layout(std::string_view(value->get_string()), kMaxWorldSize);
      if (!parsed)
        return error({"stages"}, fmt::format("'stages' is no pipeline layout as Megatron-Core's, "
                                             "like \"Et*3|t*4|t*3L\": {}",
                                             parsed.error().message()));
      parts = std::move(parsed).value();
    } else if (value->is_array()) {
      for (size_t i = 0; i < value->get_array().size(); ++i) {
        PTC_TRY(parts.emplace_back(), stage(value->get_array()[i], {"stages", std::to_string(i)}));
      }
    } else {
      return error({"stages"}, "'stages' must be a list of layer counts");
    }
    if (parts.size() != spec.chunks()) return error({"stages"}, count_differs(spec, parts.size()));
    return place(parts, spec);
  }

  /// 4, or [4, "head"]
  Result<StageParts> stage(const json::value& value, const std::vector<std::string>& path) const {
    constexpr std::string_view kWhat =
        "a stage's number of layers must be a whole number, or a list of that and of "
        "\"embedding\", \"mtp\" and \"head\"";
    StageParts parts;
    const json::array alone{value};
    for (const json::value& part : value.is_array() ? value.get_array() : alone) {
      const std::optional<uint64_t> layers = whole_number(part);
      const std::string_view word = part.is_string() ? std::string_view(part.get_string()) : "";
      if (layers && *layers <= UINT32_MAX && parts.layers == 0) parts.layers = *layers;
      else if (value.is_array() && word == "embedding") ++parts.embeddings;
      else if (value.is_array() && word == "mtp") ++parts.mtp;
      else if (value.is_array() && word == "head") ++parts.heads;
      else return error(path, std::string(kWhat));
    }
    return parts;
  }

  Result<> place(const std::vector<StageParts>& parts, LayoutSpec& spec) const {
    constexpr uint64_t kMostMtp = 64;
    const auto twice = [&](std::string_view what) {
      return error({"stages"}, fmt::format("'stages' has {}", what));
    };
    for (uint32_t i = 0; i < parts.size(); ++i) {
      const StageParts& one = parts[i];
      spec.stages.push_back(static_cast<uint32_t>(one.layers));
      if (one.embeddings > (spec.embedding_at ? 0 : 1)) return twice("the embedding twice");
      if (one.heads > (spec.head_at ? 0 : 1)) return twice("the head twice");
      if (one.mtp > (spec.mtp_at ? 0 : kMostMtp))
        return twice(fmt::format("\"mtp\" on two stages, or more than {} times", kMostMtp));
      if (one.embeddings > 0) spec.embedding_at = i;
      if (one.heads > 0) spec.head_at = i;
      if (one.mtp > 0) {
        spec.mtp_at = i;
        spec.mtp_layers = static_cast<uint32_t>(one.mtp);
      }
    }
    // Where they are anyhow: one layout has one name.
    if (spec.embedding_at == 0u) spec.embedding_at.reset();
    if (spec.head_at == spec.chunks() - 1) spec.head_at.reset();
    if (spec.mtp_at == spec.head_chunk()) spec.mtp_at.reset();
    return ok();
  }

  Result<> devices(Layout& layout) const {
    const json::value* value = object_.if_contains("devices");
    if (!value) return ok();
    if (!value->is_array()) {
      return error({"devices"}, "'devices' must be a list of \"node:device\", one for each rank");
    }
    const json::array& list = value->get_array();
    const ParallelConfig& sizes = layout.spec.sizes;
    if (list.size() != sizes.world_size()) {
      return error({"devices"},
                   fmt::format("'devices' has {} entries, but {}·pp·dp·ep·cp = {} ranks",
                               list.size(), sizes.etp != 0 ? "etp" : "tp", sizes.world_size()));
    }
    for (size_t i = 0; i < list.size(); ++i) {
      if (!list[i].is_string() || !is_device(std::string_view(list[i].get_string()))) {
        return error({"devices", std::to_string(i)},
                     "a device must be \"node:index\", such as \"w0:3\"");
      }
      layout.devices.emplace_back(std::string_view(list[i].get_string()));
    }
    return ok();
  }
};

/// Takes "<word><number>" off the front; the number has no superfluous zeros.
std::optional<uint32_t> take_size(std::string_view& text, std::string_view word) {
  if (!text.starts_with(word)) return std::nullopt;
  const std::string_view rest = text.substr(word.size());
  uint32_t number = 0;
  auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), number);
  if (error != std::errc() || number == 0 || number > kMaxWorldSize || rest[0] == '0') {
    return std::nullopt;
  }
  text.remove_prefix(word.size() + static_cast<size_t>(end - rest.data()));
  return number;
}

/// Takes `word` off the front, where it is a whole part of the name.
bool take_word(std::string_view& text, std::string_view word) {
  if (!text.starts_with(word)) return false;
  if (text.size() > word.size() && text[word.size()] != '-') return false;
  text.remove_prefix(word.size());
  return true;
}

/// The order as a part of a name, where dashes are between the parts.
std::string with_underscores(std::string text) {
  std::replace(text.begin(), text.end(), '-', '_');
  return text;
}

/// Takes what is behind the sizes off the front.
void take_words(std::string_view& text, LayoutSpec& spec) {
  for (OptimizerCut cut : {OptimizerCut::kZero1, OptimizerCut::kFsdp})
    if (take_word(text, fmt::format("-{}", optimizer_name(cut)))) spec.optimizer = cut;
  for (const auto& [word, cp, ep] :
       {std::tuple("cp", true, false), {"ep", false, true}, {"cp_ep", true, true}})
    if (take_word(text, fmt::format("{}{}", kOverPart, word)))
      spec.shard_cp = cp, spec.shard_ep = ep;
  if (take_word(text, fmt::format("{}{}", kNamingPart, naming_name(Naming::kStage))))
    spec.naming = Naming::kStage;
  if (!text.starts_with(kOrderPart)) return;
  std::string order(text.substr(kOrderPart.size()));
  std::replace(order.begin(), order.end(), '_', '-');
  const auto parsed = RankOrder::parse(order);
  if (!parsed) return;
  spec.order = parsed.value();
  text = {};
}

}  // namespace

const std::string& LayoutRules::text() const { return set_->text(); }

std::string LayoutRules::id() const { return fmt::format("{:08x}", name_hash(text())); }

/// "tp1-pp2-dp8-ep4-etp2-cp2-vpp2-shard4-fsdp-over_cp_ep-naming_stage-order_tp_cp_pp_ep_dp", then
/// "-rules_1f2e3d4c" and "+0c73b331": all that is behind dp is left out at its default. An older
/// ptcfs had all but the sizes in the hex digits: jobs know such names still
/// (JobRecord::custom_specs).
std::string LayoutSpec::name() const {
  std::string text = fmt::format("tp{}-pp{}-dp{}", sizes.tp, sizes.pp, sizes.dp);
  if (sizes.ep != 1) text += fmt::format("-ep{}", sizes.ep);
  if (sizes.etp != 0) text += fmt::format("-etp{}", sizes.etp);
  if (sizes.cp != 1) text += fmt::format("-cp{}", sizes.cp);
  if (vpp != 1) text += fmt::format("-vpp{}", vpp);
  if (dp_shard != 0) text += fmt::format("-shard{}", dp_shard);
  if (optimizer != OptimizerCut::kReplicated) text += fmt::format("-{}", optimizer_name(optimizer));
  if (shard_cp || shard_ep) text += fmt::format("{}{}", kOverPart, shard_over(*this));
  if (naming != Naming::kGlobal) text += fmt::format("{}{}", kNamingPart, naming_name(naming));
  if (order != RankOrder())
    text += fmt::format("{}{}", kOrderPart, with_underscores(order.to_string()));
  if (rules) text += fmt::format("{}{}", kRulesPart, rules.id());
  if (stages.empty()) return text;
  std::string by_hand = fmt::format("stages={};", fmt::join(stages, ","));
  if (embedding_at) by_hand += fmt::format("embedding={};", *embedding_at);
  if (head_at) by_hand += fmt::format("head={};", *head_at);
  if (mtp_layers > 0) by_hand += fmt::format("mtp={}*{};", mtp_chunk(), mtp_layers);
  text += fmt::format("+{:08x}", name_hash(by_hand));
  return text;
}

std::string_view LayoutSpec::rules_in_name(std::string_view name) {
  const size_t at = name.rfind(kRulesPart);
  if (at == std::string_view::npos) return {};
  const std::string_view id = name.substr(at + kRulesPart.size());
  return is_id(id) ? id : std::string_view();
}

Result<LayoutSpec> LayoutSpec::from_name(std::string_view name) {
  LayoutSpec spec;
  std::string_view rest = name;
  const auto tp = take_size(rest, "tp");
  const auto pp = take_size(rest, "-pp");
  const auto dp = take_size(rest, "-dp");
  if (tp && pp && dp) {
    spec.sizes = {.tp = *tp, .pp = *pp, .dp = *dp};
    if (const auto ep = take_size(rest, "-ep")) spec.sizes.ep = *ep;
    if (const auto etp = take_size(rest, "-etp")) spec.sizes.etp = *etp;
    if (const auto cp = take_size(rest, "-cp")) spec.sizes.cp = *cp;
    if (const auto vpp = take_size(rest, "-vpp")) spec.vpp = *vpp;
    if (const auto shard = take_size(rest, "-shard")) spec.dp_shard = *shard;
    take_words(rest, spec);
    if (rest.empty() && spec.dp_shard != spec.sizes.dp && spec.sizes.etp != spec.sizes.tp &&
        spec.name() == name) {
      auto why = fits_world_size(spec.sizes) ? why_no_etp(spec) : too_many_ranks();
      if (!why && is_over_one_rank(spec)) why = "there is one such rank to be cut over";
      if (!why) why = why_no_chunks(spec);
      if (!why) why = why_no_shards(spec);
      if (!why) why = why_not_over(spec);
      if (why) return invalid_argument("{} names no layout: {}", quoted(name), *why);
      return spec;
    }
  }
  return invalid_argument(
      "{} does not name a layout: expected tp<N>-pp<N>-dp<N>, then what is not the default of "
      "-ep<N>, -etp<N>, -cp<N>, -vpp<N>, -shard<N>, -zero1 or -fsdp, -over_<…>, -naming_stage and "
      "-order_<…>, in this order",
      quoted(name));
}

uint32_t LayoutSpec::dp_part(const RankCoords& rank) const {
  const ParallelConfig group = sharing(true);
  return static_cast<uint32_t>(
      order.global_rank(group, {.dp = rank.dp % group.dp, .cp = rank.cp % group.cp}));
}

void LayoutSpec::forget_stages() {
  stages.clear();
  embedding_at.reset();
  head_at.reset();
  mtp_at.reset();
  mtp_layers = 0;
}

json::object LayoutSpec::to_json() const {
  json::object object{{"tp", sizes.tp}, {"pp", sizes.pp}, {"dp", sizes.dp}};
  if (sizes.ep != 1) object["ep"] = sizes.ep;
  if (sizes.etp != 0) object["etp"] = sizes.etp;
  if (sizes.cp != 1) object["cp"] = sizes.cp;
  if (vpp != 1) object["vpp"] = vpp;
  if (order != RankOrder()) object["order"] = order.to_string();
  if (!stages.empty()) object["stages"] = stages_to_json(*this);
  if (naming != Naming::kGlobal) object["naming"] = naming_name(naming);
  if (optimizer != OptimizerCut::kReplicated) object["optimizer"] = optimizer_name(optimizer);
  if (dp_shard != 0) object["dp_shard"] = dp_shard;
  json::array over;
  if (shard_cp) over.push_back("cp");
  if (shard_ep) over.push_back("ep");
  if (!over.empty()) object["shard_over"] = std::move(over);
  if (rules) object["rules"] = rules.text();
  return object;
}

Result<LayoutSpec> LayoutSpec::from_json(const json::object& object) {
  json::object rest = object;
  LayoutRules rules;
  if (const json::value* text = object.if_contains("rules"); text != nullptr && text->is_string()) {
    PTC_TRY(auto set, RuleSet::parse(text->get_string()));
    rules = LayoutRules(std::move(set));
    rest.erase("rules");
  }
  PTC_TRY(Layout layout, Layout::parse(json::serialize(rest)));
  layout.spec.rules = std::move(rules);
  return std::move(layout.spec);
}

Result<Layout> Layout::parse(std::string_view text) {
  PTC_TRY(const json::value value, parse_json(text, {.max_bytes = kMaxLayoutBytes}));
  if (!value.is_object()) {
    return invalid_argument("{}: a layout is a JSON object: {{ … }}", json_place(text, {}));
  }
  return LayoutParser(text, value.get_object()).parse();
}

Result<std::vector<uint32_t>> stage_boundaries(const LayoutSpec& spec, uint32_t layers) {
  const uint32_t stage_count = spec.chunks();
  std::vector<uint32_t> boundaries = {0};
  boundaries.reserve(stage_count + size_t{1});
  if (spec.stages.empty()) {
    for (uint32_t stage = 0; stage < stage_count; ++stage) {
      boundaries.push_back(boundaries.back() + layers / stage_count +
                           (stage < layers % stage_count ? 1 : 0));
    }
    return boundaries;
  }
  if (spec.stages.size() != stage_count)
    return invalid_argument("{}", count_differs(spec, spec.stages.size()));
  uint64_t sum = 0;
  for (uint32_t count : spec.stages) {
    sum += count;
    if (sum <= layers) boundaries.push_back(static_cast<uint32_t>(sum));
  }
  const uint32_t mtp = spec.mtp_chunk();
  if (sum + spec.mtp_layers == layers && boundaries[mtp + 1] == sum) {
    for (uint32_t i = mtp + 1; i <= stage_count; ++i) boundaries[i] = layers;
    return boundaries;
  }
  if (sum != layers) {
    return invalid_argument("'stages' [{}] adds up to {} layers, but the model has {}",
                            printable(fmt::format("{}", fmt::join(spec.stages, ", ")), 200), sum,
                            layers);
  }
  return boundaries;
}

std::string default_layout_text() {
  return "{\n  \"format\": \"ptc-layout/1\",\n  \"tp\": 1, \"pp\": 1, \"dp\": 1\n}\n";
}

}  // namespace ptc
