#include "dataset/run/data_set_state.h"

#include <array>
#include <charconv>

namespace ptc {
namespace {

constexpr int kMostTries = 50;
constexpr std::array<const char*, 6> kRecordKeys = {"source",   "order", "plan",
                                                    "consumed", "dp",    "saved"};

Error damaged_record(std::string_view key) {
  return make_error(Code::kCorrupt, "the metadata of the data set are damaged: {}", key);
}

template <class Number>
bool take_number(std::string_view& text, Number& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc()) return false;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return true;
}

/// The state as the values of kRecordKeys; nullopt: no such key.
std::array<std::optional<std::string>, kRecordKeys.size()> values_of(const DataSetState& state) {
  std::array<std::optional<std::string>, kRecordKeys.size()> values;
  values[0] = state.source;
  values[1] = state.order;
  if (state.plan) values[2] = state.plan->to_text();
  if (state.consumed != 0) values[3] = std::to_string(state.consumed);
  if (state.dp.revision != 0 || state.dp.ranks != 1) {
    values[4] = fmt::format("{} {}", state.dp.ranks, state.dp.revision);
  }
  if (state.saved) values[5] = fmt::format("{} {}", state.saved->number, state.saved->by.to_text());
  return values;
}

}  // namespace

std::optional<OrderSpec> DataSetState::order_spec() const {
  if (!order) return std::nullopt;
  auto parsed = OrderSpec::parse(*order);
  return parsed ? std::optional(parsed.value()) : std::nullopt;
}

struct DataSetRecord::Read {
  DataSetState state;
  std::array<int64_t, kRecordKeys.size()> revisions{};
};

DataSetRecord::DataSetRecord(MetaClient& meta, std::string job,
                             std::function<Result<int64_t>(MetaTransaction)> commit)
    : meta_(meta), job_(std::move(job)), commit_(std::move(commit)) {}

Result<DataSetRecord::Read> DataSetRecord::read_all() const {
  PTC_TRY(const auto entries, meta_.list(prefix()));
  Read read;
  for (const MetaEntry& entry : entries) {
    const std::string key = entry.key.substr(prefix().size());
    for (size_t i = 0; i < kRecordKeys.size(); ++i) {
      if (key == kRecordKeys[i]) read.revisions[i] = entry.revision;
    }
    std::string_view value = entry.value;
    DataSetState& state = read.state;
    if (key == "source") state.source = entry.value;
    if (key == "order") state.order = entry.value;
    if (key == "plan") {
      PTC_TRY(state.plan, RunPlan::from_text(value));
    }
    if (key == "consumed" && (!take_number(value, state.consumed) || !value.empty())) {
      return damaged_record(key);
    }
    if (key == "dp") {
      const bool ranks = take_number(value, state.dp.ranks) && value.starts_with(' ');
      if (ranks) value.remove_prefix(1);
      if (!ranks || !take_number(value, state.dp.revision) || !value.empty())
        return damaged_record(key);
    }
    if (key == "saved") {
      DataSetState::Saved saved;
      if (!take_number(value, saved.number) || !value.starts_with(' ')) return damaged_record(key);
      PTC_TRY(saved.by, User::from_text(value.substr(1)));
      state.saved = std::move(saved);
    }
  }
  const std::optional<RunPlan>& plan = read.state.plan;
  if (plan ? read.state.consumed < plan->last().from || read.state.consumed > plan->end()
           : read.state.consumed != 0) {
    return damaged_record("consumed");
  }
  return read;
}

Result<DataSetState> DataSetRecord::read() const {
  PTC_TRY(Read found, read_all());
  return std::move(found.state);
}

Result<DataSetState> DataSetRecord::update(const std::function<Result<>(DataSetState&)>& decide,
                                           const Commit& commit) const {
  for (int tries = 0;; ++tries) {
    PTC_TRY(const Read before, read_all());
    DataSetState after = before.state;
    PTC_TRY(decide(after));
    if (after == before.state && !commit) return after;
    PTC_TRY(const auto job, meta_.get("jobs/" + job_));
    if (!job) return make_error(Code::kNotFound, "job {} was removed", job_);
    MetaTransaction transaction;
    transaction.compares = {{job->key, job->revision}};
    const auto old_values = values_of(before.state), values = values_of(after);
    for (size_t i = 0; i < kRecordKeys.size(); ++i) {
      const std::string key = prefix() + kRecordKeys[i];
      transaction.compares.push_back({key, before.revisions[i]});
      if (values[i] == old_values[i]) continue;
      if (values[i]) {
        transaction.puts.emplace_back(key, *values[i]);
      } else {
        transaction.deletes.push_back(key);
      }
    }
    const Result<int64_t> committed = commit    ? commit(transaction)
                                      : commit_ ? commit_(transaction)
                                                : meta_.commit(transaction);
    if (committed) return after;
    if (committed.error().code() != Code::kConflict || tries == kMostTries)
      return committed.error();
  }
}

}  // namespace ptc
