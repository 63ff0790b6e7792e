// What users save in a job beside checkpoints: layout.json, rules.json, and whose these and the
// job's other names are, and for whom.
#include <spdlog/spdlog.h>

#include <functional>

#include "reshard/cluster/tell.h"
#include "reshard/job/drain.h"
#include "reshard/job/job.h"
#include "reshard/job/job_parts.h"
#include "reshard/ptc/rule_set.h"
#include "store/base/mutex.h"

namespace ptc {
namespace {

constexpr const char* kLayoutFile = "layout.json";
// With layout.json in one value of the metadata, and in one transaction with the layout's spec.
constexpr size_t kMostRulesBytes = 128 << 10, kMostLayoutWithRules = 400 << 10;

/// What a layout was checked against, and the outcome.
class LookedAt {
 public:
  LookedAt() = default;  // at nothing
  LookedAt(const KnownJob& known, LayoutSpec spec)
      : spec_(std::move(spec)), newest_(newest_of(known)), drained_(known.drained) {
    if (newest_ != nullptr) stored_ = newest_->stored();
  }
  bool is_of(const KnownJob& known, const LayoutSpec& spec) const {
    return spec_ == spec && newest_of(known) == newest_ && known.drained == drained_ &&
           (newest_ == nullptr || newest_->stored() == stored_);
  }

  Result<> fits = ok();

 private:
  static CheckpointRef newest_of(const KnownJob& known) {
    const CheckpointRecord* latest = known.latest();
    return latest != nullptr ? latest->checkpoint : nullptr;
  }

  std::optional<LayoutSpec> spec_;
  CheckpointRef newest_;
  std::shared_ptr<const StoredState> stored_;  // of that
  std::vector<std::string> drained_;
};

bool lets_more(const JobAttributes& attributes, const Job::AtMost& at_most) {
  return (attributes.of(at_most.name).mode.value_or(kTextMode) & ~at_most.mode & 0777) != 0;
}

}  // namespace

std::string Job::layout_text() const { return impl_->knowledge.now()->saved.text; }

Result<> Job::save_layout(const std::string& text, const std::optional<AtMost>& at_most) {
  PTC_TRY(impl_->see_what_came_back());
  PTC_TRY(impl_->save_layout(text, at_most));
  tell_others(*impl_->services.cluster, name_);
  return ok();
}

Result<> Job::Impl::save_layout(const std::string& text,
                                const std::optional<Job::AtMost>& at_most) {
  // What takes long is done before: nobody else who decides waits for a plan, or for other nodes.
  LookedAt looked_at;
  if (const JobKnowledge::Snapshot known = knowledge.now(); text != known->saved.text) {
    if (const Result<Layout> layout = read_layout(text, *known)) {
      looked_at = LookedAt(*known, layout.value().spec);
      looked_at.fits = check_layout(text, layout.value(), *known);
    }
  }
  MutexLock change(decisions.mutex());
  auto refuse = [&](Error error) {
    job->note_refused_save(kLayoutFile, error.message());
    return Error(Code::kInvalidArgument, error.message());
  };
  LayoutEdit edit;
  std::string spec_name;
  bool failed_before = false;
  const auto edits = [&](JobUpdate& update) -> Result<bool> {
    const LayoutEdit& before = update.saved();  // edits come one at a time
    // Whether there are such nodes, and room, is said to who saves it, and nobody promises that it
    // stays so; that they are in service is read below. Of rules.json, where it speaks of that, all
    // is read, and rules and specs of former layouts stay as they are.
    const KnownJob& known = update.glance();
    if (const auto said = Layout::parse(text); said && said.value().rules == kRulesFile) {
      PTC_TRY(const auto rules, update.rules());
      if (rules.text != known.rules_text)
        return make_error(Code::kUnavailable,
                          "rules.json of job {} has changed just now: save the layout again",
                          job->name());
    }
    Result<Layout> layout = read_layout(text, known);
    if (text == before.text &&
        (layout.has_error() || layout.value().spec.rules == before.layout.spec.rules)) {
      job->forget_refused_save(kLayoutFile);
      failed_before = known.failed && known.failed->revision == before.revision;
      return false;
    }
    if (layout.has_error()) return refuse(std::move(layout).error());
    Result<> fits = ok();
    if (looked_at.is_of(known, layout.value().spec)) fits = looked_at.fits;
    else fits = check_layout(text, layout.value(), known);
    if (fits.has_error()) return refuse(std::move(fits).error());

    edit = {text, std::move(layout).value(), before.revision + 1};
    spec_name = edit.layout.spec.name();
    // 32 bits of hash are not always enough.
    if (const auto same = known.custom_specs.find(spec_name);
        same != known.custom_specs.end() && !(same->second == edit.layout.spec))
      return refuse(
          invalid_argument("another layout of this job has the name {} already", spec_name));
    for (const std::string& node : nodes_of(edit.layout)) update.in_service(node);
    update.put(edit);
    update.put(edit.layout.spec);
    return true;
  };
  PTC_TRY(const int64_t meta_revision, decide(edits, at_most));
  if (failed_before) return want_layout_again();  // it is wanted still
  if (meta_revision == 0) return ok();
  knowledge.update([&](KnownJob& known) {
    known.saved = {edit, meta_revision};
    known.custom_specs[spec_name] = edit.layout.spec;
    known.forget_errors();
    activities.stop_reshards();  // what finds the newer edit begins after that
  });
  knowledge.tell();
  spdlog::info("job {}: layout {} accepted as revision {}", job->name(), spec_name, edit.revision);
  return ok();
}

/// By another revision of its key all nodes hear that it is.
Result<> Job::Impl::want_layout_again() {
  const auto puts_again = [](JobUpdate& update) -> Result<bool> {
    update.put(update.saved());
    return true;
  };
  PTC_TRY(int64_t meta_revision, decisions.update(puts_again));
  knowledge.update([&](KnownJob& known) {
    known.saved.meta_revision = meta_revision;
    known.failed.reset();
    known.forget_errors();
    // What failed may have been copies of an older checkpoint.
    known.look_anyway = services.cluster->shares_bytes() || known.saved.layout.in_devices;
  });
  knowledge.tell();
  return ok();
}

Result<Layout> Job::read_layout(const std::string& text) const {
  return impl_->read_layout(text, *impl_->knowledge.now());
}

/// With the rules that it speaks of.
Result<Layout> Job::Impl::read_layout(const std::string& text, const KnownJob& known) const {
  PTC_TRY(Layout layout, Layout::parse(text));
  if (layout.rules.empty()) return layout;
  const auto refuse = [&](const std::string& why) {
    return invalid_argument("{}: {}", json_place(text, {"rules"}), why);
  };
  if (layout.rules != kRulesFile) {
    layout.spec.rules = known.rules_of_id(layout.rules);
    if (layout.spec.rules) return layout;
  }
  if (known.rules_text) {
    PTC_TRY(auto own, RuleSet::parse(*known.rules_text));
    const LayoutRules rules(std::move(own));
    if (layout.rules == kRulesFile || layout.rules == rules.id()) {
      if (rules.text().size() > kMostRulesBytes ||
          text.size() + rules.text().size() > kMostLayoutWithRules)
        return refuse(fmt::format(
            "rules.json is {} bytes long, with what it extends: those of a layout are at most {}, "
            "and {} with layout.json",
            rules.text().size(), kMostRulesBytes, kMostLayoutWithRules));
      const LayoutRules same_id = known.rules_of_id(rules.id());
      if (same_id && !(same_id == rules))
        return refuse("other rules of a layout of this job have the same id: change a description");
      layout.spec.rules = rules;
      return layout;
    }
  }
  if (layout.rules == kRulesFile && known.saved.layout.rules == kRulesFile) {
    layout.spec.rules = known.saved.layout.spec.rules;  // it was removed since: they stay in force
    return layout;
  }
  if (layout.rules == kRulesFile) return refuse("this job has no rules.json");
  return refuse(fmt::format("no layout of this job had rules {}", layout.rules));
}

Result<int64_t> Job::Impl::decide(const JobUpdate::Decide& decide,
                                  const std::optional<Job::AtMost>& at_most) {
  if (!at_most) return decisions.update(decide);
  Agreed<AttributesInForce> before;
  const auto lets_no_more = [&](JobUpdate& update) -> Result<bool> {
    PTC_TRY(const bool is_decided, decide(update));
    if (!is_decided) return false;
    // Not what is known here, which may let less while what others decided is taken over.
    PTC_TRY(before, update.attributes());
    if (lets_more(*before.all, *at_most)) {
      *at_most->lets_more = true;
      return make_error(Code::kUnavailable, "{} was opened to others while it was being saved",
                        at_most->name);
    }
    return true;
  };
  return decide_again(before, lets_no_more);
}

Result<int64_t> Job::Impl::decide_again(const Agreed<AttributesInForce>& read,
                                        const JobUpdate::Decide& decide) {
  constexpr int kMostTries = 50;
  for (int tries = 0;; ++tries) {
    bool is_decided = false;
    const auto once = [&](JobUpdate& update) -> Result<bool> {
      PTC_TRY(is_decided, decide(update));
      return is_decided;
    };
    Result<int64_t> committed = decisions.update(once);
    if (committed || committed.error().code() != Code::kConflict || !is_decided ||
        tries == kMostTries)
      return committed;
    PTC_TRY(const auto now, JobRecord::read_attributes(*services.meta, job->name()));
    if (now.meta_revision == read.meta_revision) return committed;  // it is of something else
  }
}

std::optional<std::string> Job::rules_text() const { return impl_->knowledge.now()->rules_text; }

std::shared_ptr<const JobAttributes> Job::attributes() const {
  return impl_->knowledge.now()->attributes.all;
}

Result<> Job::change_attributes(const std::string& name, const FileAttributes& change) {
  return impl_->change_attributes(
      name, [&](const auto&) { return std::optional(change); }, nothing_besides);
}

Result<std::optional<NarrowedMode>> Job::narrow_mode(const std::string& name, uint32_t mode) {
  std::optional<NarrowedMode> narrowed;
  const auto change = [&](const auto& now) -> std::optional<FileAttributes> {
    narrowed.reset();
    if (!lets_more(*now.all, {name, mode, nullptr})) return std::nullopt;
    narrowed.emplace();
    narrowed->before = now.all->of(name).mode.value_or(kTextMode);
    FileAttributes narrower;
    narrower.mode = narrowed->before & (mode | ~0777u);
    JobAttributes after = *now.all;
    after.decide(name, narrower);
    narrowed->left = after.of(name);
    return narrower;
  };
  PTC_TRY(impl_->change_attributes(name, change, nothing_besides));
  return narrowed;
}

Result<> Job::open_text(const std::string& name, uint32_t mode, const std::string& text,
                        const std::optional<NarrowedMode>& narrowed) {
  return impl_->open_text(name, mode, narrowed, [&](JobUpdate& update) -> Result<bool> {
    std::optional<std::string> now;
    if (name == kLayoutFile) {
      now = update.saved().text;
    } else {
      PTC_TRY(auto rules, update.rules());
      now = std::move(rules.text);
    }
    if (now != text) return make_error(Code::kConflict, "{} is another by now", name);
    return true;
  });
}

Result<> Job::open_text(const std::string& name, uint32_t mode, const MetaTransaction& if_so,
                        const std::optional<NarrowedMode>& narrowed) {
  return impl_->open_text(name, mode, narrowed, [&](JobUpdate& update) -> Result<bool> {
    update.add(if_so);
    return true;
  });
}

Result<> Job::Impl::open_text(const std::string& name, uint32_t mode,
                              const std::optional<NarrowedMode>& narrowed,
                              const JobUpdate::Decide& is_this_text) {
  const auto opened = [&](const auto& now) -> Result<std::optional<FileAttributes>> {
    if (narrowed && !(now.all->of(name) == narrowed->left))
      return make_error(Code::kConflict, "the mode of {} was changed meanwhile", name);
    FileAttributes change;
    change.mode = mode;
    return std::optional(change);
  };
  return change_attributes(name, opened, is_this_text);
}

Result<> Job::Impl::change_attributes(const std::string& name, const ChangeOfAttributes& change,
                                      const JobUpdate::Decide& besides) {
  const auto decided = [&]() -> Result<bool> {
    MutexLock one(attributes_mutex);
    Agreed<AttributesInForce> before;
    JobAttributes after;
    const auto changes = [&](JobUpdate& update) -> Result<bool> {
      PTC_TRY(const bool holds, besides(update));
      PTC_TRY(before, update.attributes());
      after = *before.all;
      PTC_TRY(const std::optional<FileAttributes> changed, change(before));
      if (!holds || !changed) return false;
      after.decide(name, *changed);
      if (after != *before.all) update.put_attributes(after);
      return true;
    };
    PTC_TRY(const int64_t revision, decide_again(before, changes));
    return take_over_of(name, after, after == *before.all ? before.meta_revision : revision);
  }();
  if (!decided) return decided.error();
  if (decided.value() && listener != nullptr) listener->attributes_changed(job->name());
  tell_others(*services.cluster, job->name());
  return ok();
}

void Job::Impl::tell_of_opened(const JobAttributes& after) const {
  if (listener == nullptr) return;
  for (const std::string& text : after.opened_since(*knowledge.now()->attributes.all))
    listener->text_opens(job->name(), text);
}

/// Of other names' modes what both let: others may have decided about them, whose texts this node
/// has not taken over yet. What follows does, and then takes over these.
bool Job::Impl::take_over_of(const std::string& name, const JobAttributes& after,
                             int64_t revision) {
  tell_of_opened(after);
  return knowledge.update([&](KnownJob& known) {
    const Agreed<AttributesInForce>& now = known.attributes;
    if (revision < now.meta_revision) return false;
    auto all = std::make_shared<JobAttributes>(after.meanwhile(*now.all));
    all->erase(name);
    if (after.has(name)) all->update(name, after.of(name));
    known.set_attributes({{std::move(all)}, revision});
    return true;
  });
}

Result<> Job::save_rules(const std::string& text, const std::optional<AtMost>& at_most) {
  PTC_TRY(impl_->save_rules(text, at_most));
  tell_others(*impl_->services.cluster, name_);
  return ok();
}

Result<> Job::Impl::save_rules(const std::string& text, const std::optional<Job::AtMost>& at_most) {
  MutexLock change(decisions.mutex());
  Result<std::shared_ptr<const RuleSet>> parsed = RuleSet::parse_new(text);
  if (parsed.has_error()) {
    job->note_refused_save("rules.json", parsed.error().message());
    return std::move(parsed).error();
  }
  const auto saves = [&](JobUpdate& update) -> Result<bool> {
    update.put_rules(text);
    return true;
  };
  PTC_TRY(decide(saves, at_most));
  knowledge.update([&](KnownJob& known) {
    known.rules_text = text;
    known.forget_error("rules.json ");
  });
  return ok();
}

Result<> Job::remove_rules(const std::optional<std::string>& only) {
  PTC_TRY(impl_->remove_rules(only));
  tell_others(*impl_->services.cluster, name_);
  return ok();
}

Result<> Job::Impl::remove_rules(const std::optional<std::string>& only) {
  MutexLock change(decisions.mutex());
  MutexLock one(attributes_mutex);
  JobAttributes attributes;
  bool had_some = false;
  const auto removes = [&](JobUpdate& update) -> Result<bool> {
    if (only) {
      PTC_TRY(const auto rules, update.rules());
      if (!rules.text || *rules.text != *only)
        return make_error(Code::kConflict, "rules.json has changed meanwhile");
    }
    update.remove_rules();
    // Its owner and mode go with it. Where it has none, nobody is in the way who changes those of
    // other names.
    PTC_TRY(const auto before, update.glance_at_attributes());
    attributes = *before.all;
    had_some = attributes.erase("rules.json");
    if (had_some) {
      update.rests_on(before);
      update.put_attributes(attributes);
    }
    return true;
  };
  PTC_TRY(const int64_t revision, decisions.update(removes));
  knowledge.update([](KnownJob& known) {
    known.rules_text.reset();
    known.forget_error("rules.json ");
  });
  if (had_some && take_over_of("rules.json", attributes, revision) && listener != nullptr)
    listener->attributes_changed(job->name());
  return ok();
}

void Job::note_refused_save(const std::string& file, const std::string& why) {
  impl_->knowledge.update([&](KnownJob& known) { known.note_refused_save(file, why); });
  spdlog::info("job {}: {} refused: {}", name_, file, why);
}

void Job::conceal_refused_save(const std::string& file, const std::string& why) {
  impl_->knowledge.update([&](KnownJob& known) { known.conceal_refused_save(file, why); });
}

void Job::forget_refused_save(const std::string& file) {
  impl_->knowledge.update([&](KnownJob& known) { known.forget_refused_save(file); });
}

}  // namespace ptc
