#include "tools/ptc/layout_edit.h"

#include <fcntl.h>

#include <algorithm>
#include <boost/json/array.hpp>
#include <charconv>
#include <sstream>
#include <utility>

#include "reshard/ptc/layout.h"
#include "reshard/serve/served_layout.h"
#include "store/base/file.h"
#include "tools/cli/numbers.h"
#include "tools/ptc/fields.h"

namespace ptc::cli {
namespace {

std::vector<std::string> parts_of_name(std::string_view name) {
  std::vector<std::string> parts;
  std::istringstream text{std::string(name.substr(0, name.find('+')))};
  for (std::string part; std::getline(text, part, '-');) parts.push_back(part);
  return parts;
}

/// By their keys in layout.json.
std::vector<std::pair<std::string, uint32_t>> sizes_of_name(std::string_view name) {
  std::vector<std::pair<std::string, uint32_t>> sizes;
  for (std::string part : parts_of_name(name)) {
    const size_t digits = part.find_first_of("0123456789");
    uint32_t value = 0;
    const char* end = part.data() + part.size();
    if (digits == part.npos || std::from_chars(part.data() + digits, end, value).ptr != end)
      continue;
    part.resize(digits);
    for (const char* size : {"tp", "pp", "dp", "ep", "etp", "cp", "vpp"})
      if (part == size) sizes.emplace_back(size, value);
    if (part == "shard") sizes.emplace_back("dp_shard", value);
  }
  return sizes;
}

uint64_t size_or_one(const json::object& layout, std::string_view key) {
  return std::max<uint64_t>(1, number_field(layout, key));
}

void set_size(json::object& layout, std::string_view key, std::optional<uint32_t> value) {
  if (value) layout.insert_or_assign(key, *value);
}

/// Part of a pipeline layout as Megatron-Core writes it, "Et*3|t*3L"; commas in it are not kept.
bool is_pipeline_layout(const std::string& text) {
  return text.find_first_of("EtmL|") != text.npos &&
         text.find_first_not_of("EtmL|()* 0123456789") == text.npos;
}

CLI::Validator layers_or_even() {
  auto check = [layers = whole_number(0, UINT32_MAX)](std::string& text) {
    if (text == kEven || is_pipeline_layout(text)) return std::string();
    if (text.find_first_of("EtmL|") == text.npos) return layers(text);
    return fmt::format("'{}' is no pipeline layout like 'Et*3|t*4|t*3L'", text);
  };
  return CLI::Validator(check, "", "layers");
}

bool has(const std::vector<std::string>& values, std::string_view word) {
  return std::find(values.begin(), values.end(), word) != values.end();
}

json::array json_list(const auto& values) {
  json::array list;
  for (const auto& value : values) list.emplace_back(value);
  return list;
}

}  // namespace

bool LayoutEdit::empty() const {
  return !tp && !pp && !dp && !ep && !etp && !cp && !vpp && stages.empty() && !order && !naming &&
         !optimizer && !rules && !dp_shard && shard_over.empty() && devices.empty() && !replicas &&
         !keep && !memory;
}

void add_layout_options(CLI::App& app, LayoutEdit& edit, bool all) {
  const char* group = "Layout";
  const CLI::Validator size = whole_number(1, kMaxWorldSize);
  app.add_option("--tp", edit.tp, "tensor-parallel size")
      ->type_name("N")
      ->check(size)
      ->group(group);
  app.add_option("--pp", edit.pp, "pipeline stages")->type_name("N")->check(size)->group(group);
  app.add_option("--dp", edit.dp, "data-parallel replicas")
      ->type_name("N")
      ->check(size)
      ->group(group);
  app.add_option("--ep", edit.ep, "expert-parallel size")
      ->type_name("N")
      ->check(size)
      ->group(group);
  app.add_option("--etp", edit.etp, "tensor-parallel size of experts; 0: tp")
      ->type_name("N")
      ->check(whole_number(0, kMaxWorldSize))
      ->group(group);
  app.add_option("--cp", edit.cp, "context-parallel size")
      ->type_name("N")
      ->check(size)
      ->group(group);
  app.add_option("--vpp", edit.vpp, "stretches of layers of each pipeline stage")
      ->type_name("N")
      ->check(size)
      ->group(group);
  app.add_option("--stages", edit.stages,
                 "layers of each pipeline stage, or stretch; or even;\n"
                 "or as Megatron-Core: 'Et*3|t*4|t*3L'")
      ->type_name("A,B")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->check(layers_or_even())
      ->group(group);
  if (!all) return;
  app.add_option("--devices", edit.devices, "node:device of each rank; or auto")
      ->type_name("W:D,W:D")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->group(group);
  app.add_option("--order", edit.order, "rank order, fastest first: tp-cp-ep-dp-pp")
      ->type_name("O")
      ->group(group);
  app.add_option("--naming", edit.naming, "tensor names of the whole model, or of a stage")
      ->type_name("global|stage")
      ->group(group);
  app.add_option("--optimizer", edit.optimizer, "how optimizer state is cut")
      ->type_name("replicated|zero1|fsdp")
      ->group(group);
  app.add_option("--dp-shard", edit.dp_shard, "dp ranks among which it is cut; 0: all")
      ->type_name("N")
      ->check(whole_number(0, kMaxWorldSize))
      ->group(group);
  app.add_option("--shard-over", edit.shard_over, "ranks over which it is cut too; dp: no others")
      ->type_name("cp|ep|cp,ep|dp")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->group(group);
  app.add_option("--rules", edit.rules, "rules.json, or an id of before; none: the commit's")
      ->type_name("R")
      ->group(group);
  app.add_option("--replicas", edit.replicas, "further copies on other nodes")
      ->type_name("N")
      ->check(whole_number(0, kMaxReplicas))
      ->group(group);
  app.add_option("--keep", edit.keep, "newest checkpoints that stay; 0: all")
      ->type_name("N")
      ->check(whole_number(0, UINT32_MAX))
      ->group(group);
  app.add_option("--memory", edit.memory,
                 "where ranks' files are: of each rank's GPU, or the host's")
      ->type_name("device|host")
      ->group(group);
}

json::object edited_layout(json::object layout, const LayoutEdit& edit,
                           std::vector<std::string>& notes) {
  set_size(layout, "tp", edit.tp);
  set_size(layout, "pp", edit.pp);
  set_size(layout, "dp", edit.dp);
  set_size(layout, "ep", edit.ep);
  if (edit.etp == 0u) layout.erase("etp");
  else set_size(layout, "etp", edit.etp);
  set_size(layout, "cp", edit.cp);
  set_size(layout, "vpp", edit.vpp);
  if (has(edit.stages, kEven)) {
    layout.erase("stages");
  } else if (!edit.stages.empty()) {
    const bool letters = std::any_of(edit.stages.begin(), edit.stages.end(), &is_pipeline_layout);
    json::array stages;
    for (const std::string& layers : edit.stages)
      if (!letters) stages.emplace_back(std::stoull(layers));
    if (letters) layout.insert_or_assign("stages", fmt::format("{}", fmt::join(edit.stages, ",")));
    else layout.insert_or_assign("stages", std::move(stages));
  }
  if (has(edit.devices, kAuto)) layout.erase("devices");
  else if (!edit.devices.empty()) layout.insert_or_assign("devices", json_list(edit.devices));
  if (edit.order) layout.insert_or_assign("order", *edit.order);
  if (edit.naming) layout.insert_or_assign("naming", *edit.naming);
  if (edit.optimizer) layout.insert_or_assign("optimizer", *edit.optimizer);
  if (edit.rules == kNoRules) layout.erase("rules");
  else if (edit.rules) layout.insert_or_assign("rules", *edit.rules);
  if (edit.dp_shard == 0u) layout.erase("dp_shard");
  else set_size(layout, "dp_shard", edit.dp_shard);
  const bool dp_alone = std::all_of(edit.shard_over.begin(), edit.shard_over.end(),
                                    [](const std::string& one) { return one == kDpAlone; });
  if (dp_alone && !edit.shard_over.empty()) layout.erase("shard_over");
  else if (!dp_alone) layout.insert_or_assign("shard_over", json_list(edit.shard_over));
  if (edit.replicas) layout.insert_or_assign("replicas", *edit.replicas);
  if (edit.keep) layout.insert_or_assign("keep", *edit.keep);
  if (edit.memory) layout.insert_or_assign("memory", *edit.memory);

  const uint64_t pp = size_or_one(layout, "pp"), vpp = size_or_one(layout, "vpp");
  if (!edit.vpp && pp == 1 && vpp > 1) {
    notes.push_back(fmt::format("\"vpp\" was {} and is left out: one stage has all layers", vpp));
    layout.erase("vpp");
  }
  const uint64_t dp = size_or_one(layout, "dp"), shard = size_or_one(layout, "dp_shard");
  const std::string optimizer = text_field(layout, "optimizer");
  const bool cut = !optimizer.empty() && optimizer != "replicated";
  if (!edit.dp_shard && layout.contains("dp_shard") && (!cut || dp % shard != 0)) {
    notes.push_back(fmt::format(
        "\"dp_shard\" was {} and is left out: {}", shard,
        cut ? fmt::format("it does not divide dp = {}", dp) : "nothing is cut over dp"));
    layout.erase("dp_shard");
  }
  if (edit.shard_over.empty() && layout.contains("shard_over") && !cut) {
    notes.push_back("\"shard_over\" is left out: nothing is cut over dp");
    layout.erase("shard_over");
  }
  const json::array& stages = array_field(layout, "stages");
  if (edit.stages.empty() && (edit.pp || edit.vpp) && !json_text(layout, "stages").empty()) {
    notes.push_back("\"stages\" was a pipeline layout of before and is left out");
    layout.erase("stages");
  } else if (edit.stages.empty() && !stages.empty() && stages.size() != pp * vpp) {
    notes.push_back(fmt::format("\"stages\" was for {} stages and is left out: as even as possible",
                                stages.size()));
    layout.erase("stages");
  }
  uint64_t ranks = size_or_one(layout, layout.contains("etp") ? "etp" : "tp");
  for (const char* size : {"pp", "dp", "ep", "cp"}) ranks *= size_or_one(layout, size);
  const json::array& devices = array_field(layout, "devices");
  if (edit.devices.empty() && !devices.empty() && devices.size() != ranks) {
    notes.push_back(fmt::format("\"devices\" was for {} ranks and is left out: ptcfs places them",
                                devices.size()));
    layout.erase("devices");
  }
  return layout;
}

void set_sizes_of_name(json::object& layout, std::string_view name) {
  auto sizes = sizes_of_name(name);
  if (sizes.empty()) return;
  // A name leaves these out where they are 1.
  for (const char* optional_size : {"ep", "cp", "vpp"}) {
    if (layout.contains(optional_size)) layout[optional_size] = 1;
  }
  layout.erase("etp");
  for (const auto& [key, value] : sizes)
    if (key != "dp_shard") layout.insert_or_assign(key, value);
}

Result<json::object> layout_of_name(std::string_view name) {
  const std::string_view rules = LayoutSpec::rules_in_name(name);
  if (!rules.empty()) name.remove_suffix(name.size() - name.rfind('-'));
  PTC_TRY(const LayoutSpec spec, LayoutSpec::from_name(name));
  json::object layout{{"format", "ptc-layout/1"}};
  for (const auto& field : spec.to_json()) layout.insert(field);
  if (!rules.empty()) layout["rules"] = rules;
  return layout;
}

namespace {

/// Small letters, and "tp2_pp1" as "tp2-pp1".
std::string as_in_names(std::string_view text) {
  std::string plain(text);
  for (char& c : plain)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  for (size_t at = plain.find('_'); at != plain.npos; at = plain.find('_', at + 1))
    for (const char* size : {"tp", "pp", "dp", "ep", "etp", "cp", "vpp", "shard"}) {
      const std::string_view behind = std::string_view(plain).substr(at + 1);
      const size_t letters = std::string_view(size).size();
      if (behind.starts_with(size) && behind.size() > letters && behind[letters] >= '0' &&
          behind[letters] <= '9')
        plain[at] = '-';
    }
  return plain;
}

/// The name of the layout whose parts are in `text`, in any order, and not all that there must be.
/// Empty: none is, or one of them is of no name.
Result<std::string> name_meant(std::string_view text) {
  if (text.find('+') != text.npos) return std::string();
  json::object layout{{"tp", 1}, {"pp", 1}, {"dp", 1}};
  auto parts = sizes_of_name(text);
  bool some = !parts.empty();
  for (const auto& [key, value] : parts) layout.insert_or_assign(key, value);
  constexpr std::string_view kOver = "over_";
  for (const std::string& part : parts_of_name(text)) {
    if (part.starts_with(kOver)) {
      std::istringstream words(part.substr(kOver.size()));
      json::array& over = layout["shard_over"].emplace_array();
      for (std::string word; std::getline(words, word, '_');) over.emplace_back(word);
      continue;
    }
    if (sizes_of_name(part).size() > 0) continue;
    const auto one = LayoutSpec::from_name("tp1-pp1-dp1-" + part);
    if (!one) return std::string();
    some = true;
    for (const auto& [key, value] : one.value().to_json())
      if (!layout.contains(key)) layout.insert_or_assign(key, value);
  }
  if (!some) return std::string();
  PTC_TRY(const LayoutSpec spec, LayoutSpec::from_json(layout));
  return spec.name();
}

/// It is no name (`what`: what it might have been); where parts of one are meant, it says the name
/// that has them.
Error no_layout(const std::string& text, std::string_view what) {
  if (ServedLayout::is_name(text)) {
    const auto served = ServedLayout::parse(text);
    if (!served) return served.error();
    return make_error(Code::kNotFound,
                      "{} is what the workers of {} load, and no layout of a job's: "
                      "layouts/{}/ of a checkpoint has it, or says in LEFT_OUT.txt why not",
                      text, served.value().engine->name(), text);
  }
  const std::string plain = as_in_names(text);
  if (plain.starts_with("trtllm") || plain.starts_with("tensorrt"))
    return make_error(Code::kNotFound,
                      "'{}' is {}: TensorRT-LLM loads no files of single ranks; it reads hf/ of a "
                      "checkpoint",
                      text, what);
  const auto meant =
      plain != text && ServedLayout::parse(plain) ? Result<std::string>(plain) : name_meant(plain);
  if (!meant) {
    auto named = layout_of_name(text);
    if (!named) return named.error();
  }
  if (!meant || meant.value().empty())
    return make_error(Code::kNotFound, "'{}' is {}, such as tp4-pp2-dp1", text, what);
  return make_error(Code::kNotFound,
                    "'{}' is {}, which has tp, pp and dp, and the rest where it is not the "
                    "default, in one order; is it {}?",
                    text, what, meant.value());
}

}  // namespace

Result<json::object> layout_named(const std::string& text) {
  auto named = layout_of_name(text);
  return named ? std::move(named) : no_layout(text, "no layout's name");
}

Result<json::object> layout_of_file_or_name(const std::string& text) {
  auto named = layout_of_name(text);
  if (named) return named;
  auto read = read_text_file(AT_FDCWD, text, 1 << 20);
  if (!read && read.error().code() == Code::kNotFound)
    return no_layout(text, "neither a file nor a layout's name");
  PTC_TRY(auto content, std::move(read));
  auto value = parse_json(content);
  if (!value) return std::move(value).error().with_context(text);
  if (!value.value().is_object()) return invalid_argument("{}: not a JSON object", text);
  return std::move(value.value().get_object());
}

}  // namespace ptc::cli
