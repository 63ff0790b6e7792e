#include "tests/sim/transactions.h"

#include <algorithm>
#include <array>
#include <boost/json/parse.hpp>
#include <utility>

namespace ptc::sim {
namespace {

constexpr std::array<std::pair<Decision, std::string_view>, 18> kNames = {{
    {Decision::kLead, "lead"},
    {Decision::kEndLead, "end of a lead"},
    {Decision::kFlip, "flip"},
    {Decision::kOlder, "older"},
    {Decision::kTrim, "trim"},
    {Decision::kCommit, "commit"},
    {Decision::kRemoval, "removal"},
    {Decision::kPin, "pin"},
    {Decision::kReplaced, "replaced"},
    {Decision::kMended, "mended"},
    {Decision::kLayout, "layout"},
    {Decision::kAttributes, "attributes"},
    {Decision::kRules, "rules"},
    {Decision::kDataSet, "data set"},
    {Decision::kMakeJob, "job"},
    {Decision::kRemoveJob, "job removal"},
    {Decision::kDrain, "drain"},
    {Decision::kEndDrain, "end of a drain"},
}};

bool is_in_force_key(std::string_view key) {
  return key.starts_with("jobs/") && key.ends_with("/in_force");
}

const std::pair<std::string, std::string>* put_where(const MetaTransaction& transaction,
                                                     auto&& is) {
  const auto found = std::find_if(transaction.puts.begin(), transaction.puts.end(),
                                  [&](const auto& put) { return is(put.first); });
  return found == transaction.puts.end() ? nullptr : &*found;
}

bool deletes_any(const MetaTransaction& transaction, auto&& is) {
  return std::any_of(transaction.deletes.begin(), transaction.deletes.end(), is);
}

/// Of a node that does not lead, and of no commit: by what differs of what it was based on.
Decision change_of_record(const MetaTransaction& transaction, const std::string& key,
                          const std::string& value, const ValueAt& value_at) {
  for (const auto& compare : transaction.compares) {
    if (compare.key != key) continue;
    const std::string base = value_at(key, compare.revision);
    if (base.empty()) return Decision::kNone;
    const auto before = boost::json::parse(base).as_object(),
               after = boost::json::parse(value).as_object();
    if (before.at("stored") != after.at("stored")) return Decision::kReplaced;
    return before.at("pinned") != after.at("pinned") ? Decision::kPin : Decision::kMended;
  }
  return Decision::kNone;
}

}  // namespace

std::string_view name_of(Decision decision) {
  for (const auto& [one, name] : kNames)
    if (one == decision) return name;
  return "";
}

Decision decision_named(std::string_view name) {
  for (const auto& [one, its_name] : kNames)
    if (its_name == name) return one;
  return Decision::kNone;
}

Decision decision_of(const MetaTransaction& transaction, const ValueAt& value_at) {
  const auto& deletes = transaction.deletes;
  if (transaction.compares.empty() && transaction.leased_puts.empty()) return Decision::kNone;
  auto is_leader = [](const std::string& key) { return key.starts_with("leaders/"); };
  auto is_layout = [](const std::string& key) {
    return key.starts_with("jobs/") && key.ends_with("/layout");
  };
  auto is_drained = [](const std::string& key) { return key.starts_with("drained/"); };
  if (deletes_any(transaction, is_leader)) return Decision::kEndLead;
  if (!transaction.leased_puts.empty())
    return is_leader(transaction.leased_puts[0].first) ? Decision::kLead : Decision::kNone;
  if (deletes_any(transaction, is_job_key)) return Decision::kRemoveJob;
  if (deletes_any(transaction, is_checkpoint_key)) return Decision::kRemoval;
  if (deletes_any(transaction, is_drained)) return Decision::kEndDrain;
  if (deletes.empty() && transaction.puts.empty()) return Decision::kNone;
  if (put_where(transaction, is_job_key) != nullptr) return Decision::kMakeJob;
  if (put_where(transaction, is_drained) != nullptr) return Decision::kDrain;
  if (put_where(transaction, is_layout) != nullptr) return Decision::kLayout;
  if (put_where(transaction, [](const std::string& key) { return key.ends_with("/attributes"); }) !=
      nullptr)
    return Decision::kAttributes;
  if (put_where(transaction, [](const std::string& key) { return key.ends_with("/rules"); }) !=
      nullptr)
    return Decision::kRules;
  if (put_where(transaction, [](const std::string& key) {
        return key.find("/dataset/") != key.npos;
      }) != nullptr)
    return Decision::kDataSet;
  const auto* record = put_where(transaction, is_checkpoint_key);
  const bool leads = std::any_of(transaction.compares.begin(), transaction.compares.end(),
                                 [&](const auto& compare) { return is_leader(compare.key); });
  if (leads && put_where(transaction, is_in_force_key) != nullptr) return Decision::kFlip;
  if (record == nullptr) return Decision::kNone;
  if (leads)
    return std::any_of(transaction.compares.begin(), transaction.compares.end(),
                       [&](const auto& compare) { return is_layout(compare.key); })
               ? Decision::kTrim
               : Decision::kOlder;
  const bool is_new = std::any_of(
      transaction.compares.begin(), transaction.compares.end(),
      [&](const auto& compare) { return compare.key == record->first && compare.revision == 0; });
  return is_new ? Decision::kCommit
                : change_of_record(transaction, record->first, record->second, value_at);
}

}  // namespace ptc::sim
