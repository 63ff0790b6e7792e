#include "reshard/job/job_record.h"

#include <algorithm>
#include <boost/json/array.hpp>
#include <boost/json/object.hpp>
#include <boost/json/serialize.hpp>
#include <charconv>

#include "reshard/cluster/tombstones.h"
#include "reshard/ptc/rule_set.h"
#include "store/base/json.h"

namespace ptc {
namespace {

constexpr std::string_view kLayout = "layout", kInForce = "in_force", kSequence = "sequence",
                           kRules = "rules", kAttributes = "attributes", kSpecs = "specs/",
                           kCheckpoints = "checkpoints/", kLookedOver = "looked_over/";

Result<json::object> parse_object(std::string_view text) {
  PTC_TRY(auto value, parse_json(text));
  if (!value.is_object()) return make_error(Code::kCorrupt, "no JSON object");
  return std::move(value.as_object());
}

Result<int64_t> number_of(const json::object& object, std::string_view key) {
  PTC_TRY(auto value, json_uint(object, key, INT64_MAX));
  return static_cast<int64_t>(value.value_or(0));
}

Result<std::string> text_at(const json::object& object, std::string_view key) {
  const json::value* text = object.if_contains(key);
  if (text == nullptr || !text->is_string())
    return make_error(Code::kCorrupt, "there is no \"{}\"", key);
  return std::string(text->get_string());
}

Result<LayoutSpec> spec_of(const json::object& object) {
  const json::value* spec = object.if_contains("spec");
  if (spec == nullptr || !spec->is_object())
    return make_error(Code::kCorrupt, "there is no \"spec\"");
  return LayoutSpec::from_json(spec->get_object());
}

Result<LayoutEdit> parse_edit(std::string_view text) {
  PTC_TRY(auto object, parse_object(text));
  LayoutEdit edit;
  PTC_TRY(edit.revision, number_of(object, "revision"));
  PTC_TRY(edit.text, text_at(object, "text"));
  PTC_TRY(edit.layout, Layout::parse(edit.text));
  if (object.contains("rules")) {
    PTC_TRY(const auto of_layout, text_at(object, "rules"));
    PTC_TRY(auto rules, RuleSet::parse(of_layout));
    edit.layout.spec.rules = LayoutRules(std::move(rules));
  }
  return edit;
}

Result<LastSequence> parse_sequence(std::string_view text) {
  LastSequence sequence;
  const auto [end, bad] = std::from_chars(text.data(), text.data() + text.size(), sequence.last);
  if (bad != std::errc() || end != text.data() + text.size())
    return make_error(Code::kCorrupt, "it is no number");
  return sequence;
}

Result<CheckpointEntry> parse_checkpoint(std::string_view text) {
  PTC_TRY(auto object, parse_object(text));
  CheckpointEntry entry;
  PTC_TRY(entry.id, text_at(object, "id"));
  PTC_TRY(entry.stored, text_at(object, "stored"));
  PTC_TRY(entry.generation, number_of(object, "generation"));
  PTC_TRY(entry.sequence, number_of(object, "sequence"));
  PTC_TRY(entry.mended, number_of(object, "mended"));
  if (const json::value* pinned = object.if_contains("pinned"))
    entry.pinned = pinned->is_bool() && pinned->get_bool();
  if (const json::value* nodes = object.if_contains("nodes"); nodes != nullptr && nodes->is_array())
    for (const json::value& node : nodes->get_array())
      if (node.is_string()) entry.nodes.emplace_back(node.get_string());
  PTC_TRY(entry.more_nodes, number_of(object, "more_nodes"));
  if (const json::value* files = object.if_contains("files");
      files != nullptr && files->is_object())
    for (const auto& [name, facts] : files->get_object()) {
      PTC_TRY(auto file, file_facts_from(facts));
      entry.files.emplace(name, std::move(file));
    }
  return entry;
}

std::string text_of(const CheckpointEntry& entry) {
  json::object object{{"id", entry.id},
                      {"sequence", entry.sequence},
                      {"generation", entry.generation},
                      {"stored", entry.stored},
                      {"pinned", entry.pinned}};
  if (!entry.nodes.empty()) object["nodes"] = json::array(entry.nodes.begin(), entry.nodes.end());
  if (entry.more_nodes > 0) object["more_nodes"] = entry.more_nodes;
  if (entry.mended > 0) object["mended"] = entry.mended;
  if (!entry.files.empty()) {
    json::object& files = object["files"].emplace_object();
    for (const auto& [name, facts] : entry.files) files[name] = to_json(facts);
  }
  return json::serialize(object);
}

Result<Agreed<AttributesInForce>> attributes_of(const MetaEntry& entry) {
  PTC_TRY(auto all, JobAttributes::from_text(entry.value));
  return Agreed<AttributesInForce>{{std::make_shared<const JobAttributes>(std::move(all))},
                                   entry.revision};
}

json::array to_array(const std::vector<std::string>& texts) {
  return json::array(texts.begin(), texts.end());
}

/// One key below jobs/<job>/; one that is not known here belongs to others, or to a later version.
Result<> take(JobRecord& record, const std::string& what, const MetaEntry& entry) {
  if (what == kLayout) {
    PTC_TRY(auto edit, parse_edit(entry.value));
    record.saved = {std::move(edit), entry.revision};
  } else if (what == kInForce) {
    PTC_TRY(auto in_force, parse_in_force(entry.value));
    record.in_force = {std::move(in_force), entry.revision};
  } else if (what == kSequence) {
    PTC_TRY(auto sequence, parse_sequence(entry.value));
    record.sequence = {sequence, entry.revision};
  } else if (what == kRules) {
    record.rules_text = entry.value;
  } else if (what == kAttributes) {
    PTC_TRY(record.attributes, attributes_of(entry));
  } else if (what.starts_with(kSpecs)) {
    PTC_TRY(auto object, parse_object(entry.value));
    PTC_TRY(LayoutSpec spec, LayoutSpec::from_json(object));
    record.custom_specs.try_emplace(spec.name(), spec);  // an older ptcfs knew it by another
    record.custom_specs.insert_or_assign(what.substr(kSpecs.size()), std::move(spec));
  } else if (what.starts_with(kCheckpoints)) {
    PTC_TRY(auto checkpoint, parse_checkpoint(entry.value));
    record.checkpoints.insert_or_assign(
        what.substr(kCheckpoints.size()),
        Agreed<CheckpointEntry>{std::move(checkpoint), entry.revision});
  } else if (what.starts_with(kLookedOver)) {
    if (auto looked = LookedOver::from_text(entry.value))
      record.looked_over.insert_or_assign(what.substr(kLookedOver.size()),
                                          Agreed<LookedOver>{*std::move(looked), entry.revision});
  }
  return ok();
}

}  // namespace

Result<InForce> parse_in_force(std::string_view text) {
  PTC_TRY(auto object, parse_object(text));
  InForce in_force;
  PTC_TRY(in_force.revision, number_of(object, "revision"));
  PTC_TRY(in_force.spec, spec_of(object));
  if (const json::value* current = object.if_contains("current");
      current != nullptr && current->is_string())
    in_force.current = std::string(current->get_string());
  return in_force;
}

std::string LookedOver::to_text() const {
  return json::serialize(json::object{{"time_ns", time_ns},
                                      {"found", to_array(found)},
                                      {"mended", to_array(mended)},
                                      {"away", to_array(away)},
                                      {"more", more},
                                      {"not_right", not_right.to_json()}});
}

std::optional<LookedOver> LookedOver::from_text(std::string_view text) {
  Result<json::value> value = parse_json(text);
  if (value.has_error() || !value.value().is_object()) return std::nullopt;
  const json::object& object = value.value().get_object();
  const json::value* time = object.if_contains("time_ns");
  if (time == nullptr || !time->is_int64()) return std::nullopt;
  LookedOver looked{time->get_int64()};
  for (auto [key, list] : {std::pair("found", &looked.found), std::pair("mended", &looked.mended),
                           std::pair("away", &looked.away)})
    if (const json::value* texts = object.if_contains(key); texts != nullptr && texts->is_array())
      for (const json::value& one : texts->get_array())
        if (one.is_string()) list->emplace_back(std::string_view(one.get_string()));
  if (const json::value* more = object.if_contains("more"); more != nullptr && more->is_int64())
    looked.more = more->get_int64();
  if (const json::value* damage = object.if_contains("not_right");
      damage != nullptr && damage->is_object())
    looked.not_right = KnownDamage::from_json(damage->get_object());
  return looked;
}

Result<JobRecord> JobRecord::read(MetaClient& meta, std::string_view job) {
  const std::string prefix = fmt::format("jobs/{}/", job);
  PTC_TRY(auto entries, meta.list(prefix));
  JobRecord record;
  for (const MetaEntry& entry : entries)
    if (Result<> taken = take(record, entry.key.substr(prefix.size()), entry); taken.has_error())
      return make_error(Code::kCorrupt, "the metadata are damaged: {}: {}", entry.key,
                        taken.error().message());
  for (const auto& [name, checkpoint] : record.checkpoints)  // committed before there was a count
    record.sequence.last = std::max(record.sequence.last, checkpoint.sequence);
  if (record.saved.meta_revision == 0)
    return make_error(Code::kNotFound, "the metadata know no job {}", job);
  return record;
}

Result<Agreed<AttributesInForce>> JobRecord::read_attributes(MetaClient& meta,
                                                             std::string_view job) {
  PTC_TRY(const auto entry, meta.get(fmt::format("jobs/{}/{}", job, kAttributes)));
  return entry ? attributes_of(*entry) : Agreed<AttributesInForce>();
}

Result<Agreed<LookedOver>> JobRecord::read_looked_over(MetaClient& meta, std::string_view job,
                                                       std::string_view id) {
  PTC_TRY(const auto entry, meta.get(fmt::format("jobs/{}/{}{}", job, kLookedOver, id)));
  if (!entry) return Agreed<LookedOver>();
  return Agreed<LookedOver>{LookedOver::from_text(entry->value).value_or(LookedOver()),
                            entry->revision};
}

Result<Agreed<RulesText>> JobRecord::read_rules(MetaClient& meta, std::string_view job) {
  PTC_TRY(const auto entry, meta.get(fmt::format("jobs/{}/{}", job, kRules)));
  Agreed<RulesText> rules;
  if (entry) rules = {{entry->value}, entry->revision};
  return rules;
}

std::string JobDecision::key(std::string_view what) const {
  return fmt::format("jobs/{}/{}", job_, what);
}

void JobDecision::put_text(std::string_view what, std::string text) {
  transaction_.puts.emplace_back(key(what), std::move(text));
}

void JobDecision::rests_on_key(std::string key, int64_t meta_revision) {
  transaction_.compares.push_back({std::move(key), meta_revision});
}

void JobDecision::rests_on_keys(const std::vector<MetaTransaction::Compare>& others) {
  transaction_.compares.insert(transaction_.compares.end(), others.begin(), others.end());
}

void JobDecision::rests_on(const Agreed<LayoutEdit>& edit) {
  rests_on_key(key(kLayout), edit.meta_revision);
}

void JobDecision::rests_on(const Agreed<InForce>& in_force) {
  rests_on_key(key(kInForce), in_force.meta_revision);
}

void JobDecision::rests_on(const Agreed<LastSequence>& sequence) {
  rests_on_key(key(kSequence), sequence.meta_revision);
}

void JobDecision::rests_on(const Agreed<AttributesInForce>& attributes) {
  rests_on_key(key(kAttributes), attributes.meta_revision);
}

void JobDecision::rests_on(const Agreed<RulesText>& rules) {
  rests_on_key(key(kRules), rules.meta_revision);
}

void JobDecision::rests_on(std::string_view checkpoint, const Agreed<CheckpointEntry>& entry) {
  rests_on_key(key(kCheckpoints) + std::string(checkpoint), entry.meta_revision);
}

void JobDecision::rests_on_no_checkpoint(std::string_view name) {
  rests_on_key(key(kCheckpoints) + std::string(name), 0);
}

void JobDecision::add(const MetaTransaction& other) {
  rests_on_keys(other.compares);
  transaction_.puts.insert(transaction_.puts.end(), other.puts.begin(), other.puts.end());
  transaction_.deletes.insert(transaction_.deletes.end(), other.deletes.begin(),
                              other.deletes.end());
}

Result<> JobDecision::check() const {
  const std::string prefix = key("");
  const auto check = [&](std::string_view written, bool deleted) -> Result<> {
    if (!written.starts_with(prefix)) return ok();
    const std::string_view what = written.substr(prefix.size());
    if (what == kRules || what.starts_with(kSpecs) || (deleted && what.starts_with(kLookedOver)))
      return ok();
    for (const MetaTransaction::Compare& compare : transaction_.compares)
      if (compare.key == written) return ok();
    return make_error(Code::kInternal, "a decision writes {}, and does not rest on it", written);
  };
  for (const auto& [written, value] : transaction_.puts) {
    PTC_TRY(check(written, /*deleted=*/false));
  }
  for (const std::string& written : transaction_.deletes) {
    PTC_TRY(check(written, /*deleted=*/true));
  }
  return ok();
}

void JobDecision::create(std::string_view id, std::string_view time) {
  const std::string key = "jobs/" + job_;
  rests_on_key(key, 0);
  transaction_.puts.emplace_back(key, json::serialize(json::object{{"created", time}, {"id", id}}));
}

void JobDecision::put(const LayoutEdit& edit) {
  json::object object{{"revision", edit.revision}, {"text", edit.text}};
  if (const LayoutRules& rules = edit.layout.spec.rules) object["rules"] = rules.text();
  put_text(kLayout, json::serialize(object));
}

void JobDecision::put(const InForce& in_force) {
  json::object object{{"revision", in_force.revision}, {"spec", in_force.spec.to_json()}};
  if (in_force.current) object["current"] = *in_force.current;
  put_text(kInForce, json::serialize(object));
}

void JobDecision::put(const LastSequence& sequence) {
  put_text(kSequence, std::to_string(sequence.last));
}

void JobDecision::put(const LayoutSpec& spec) {
  if (!spec.name_says_all())
    put_text(std::string(kSpecs) + spec.name(), json::serialize(spec.to_json()));
}

void JobDecision::put(std::string_view checkpoint, const CheckpointEntry& entry) {
  put_text(std::string(kCheckpoints).append(checkpoint), text_of(entry));
}

void JobDecision::rests_on_looked_over(std::string_view id, int64_t meta_revision) {
  rests_on_key(key(kLookedOver).append(id), meta_revision);
}

void JobDecision::put_looked_over(std::string_view id, const LookedOver& looked) {
  put_text(std::string(kLookedOver).append(id), looked.to_text());
}

void JobDecision::forget_looked_over(std::string_view id) {
  transaction_.deletes.push_back(key(kLookedOver).append(id));
}

void JobDecision::put_attributes(const JobAttributes& attributes) {
  put_text(kAttributes, attributes.to_text());
}

void JobDecision::put_rules(std::string_view text) { put_text(kRules, std::string(text)); }

void JobDecision::remove_rules() { transaction_.deletes.push_back(key(kRules)); }

void JobDecision::remove(std::string_view checkpoint, const CheckpointEntry& entry) {
  transaction_.deletes.push_back(key(kCheckpoints).append(checkpoint));
  transaction_.puts.emplace_back(removed_checkpoint_key(entry.id),
                                 removed_checkpoint_text(job_, std::string(checkpoint)));
}

}  // namespace ptc
