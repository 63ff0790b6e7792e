// Reads the text of a rule set; see reshard/rules/README.md for the format.
#pragma once

#include <boost/json/value.hpp>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "reshard/ptc/rule_set.h"

namespace ptc {

class RuleSetParser {
 public:
  /// Gives the rule set that another `extends`.
  using Base = std::function<Result<std::shared_ptr<const RuleSet>>(std::string_view family)>;

  /// `is_new`: RuleSet::parse_new().
  RuleSetParser(std::string_view text, Base base, bool is_new)
      : text_(text), base_(std::move(base)), is_new_(is_new) {}
  Result<std::shared_ptr<const RuleSet>> parse();

 private:
  using Path = std::vector<std::string>;
  Error error(const Path& path, std::string_view message) const;
  Result<> known_keys(const boost::json::object& object, const Path& path,
                      const std::vector<std::string>& keys) const;
  Result<std::string> text_member(const boost::json::object& object, const std::string& key,
                                  const Path& path) const;
  Result<std::vector<std::string>> texts(const boost::json::value& value, const Path& path) const;

  Result<> header(const boost::json::object& object);
  Result<> facts(const boost::json::object& object);
  Result<> check_facts(const boost::json::object& object) const;
  Result<> tied(const boost::json::object& object);
  Result<> scales(const boost::json::object& object);
  Result<> quantised(const boost::json::object& object);
  Result<> adapters(const boost::json::object& object);
  Result<> wrappers(const boost::json::object& object);
  Result<> known_by(const boost::json::object& object);
  Result<> mtp_layers(const boost::json::object& object);
  Result<> rules(const boost::json::object& object);
  Result<Rule> rule(const boost::json::value& value, const Path& path) const;
  Result<NamePattern> pattern(const boost::json::value& value, const Path& path) const;
  Result<AttentionPart> attention(const boost::json::object& object, const Path& path) const;
  Result<StagePlace> stage(const boost::json::object& object, const Path& path) const;
  Result<TensorCut> cut(const boost::json::value& value, const Path& path) const;
  Result<> vocabulary(const boost::json::object& object, const Path& path, TensorCut& cut) const;
  Result<CutPart> part(const boost::json::object& object, const Path& path) const;
  Result<RuleNumber> rule_number(const boost::json::value& value, const Path& path,
                                 uint64_t min) const;
  Result<std::optional<uint64_t>> whole(const boost::json::object& object, const std::string& key,
                                        const Path& path, uint64_t min, uint64_t max) const;
  Result<bool> flag(const boost::json::object& object, const std::string& key,
                    const Path& path) const;
  std::string merged_text(const boost::json::object& object) const;

  std::string_view text_;
  Base base_;
  const bool is_new_;
  std::shared_ptr<const RuleSet> extended_;
  std::shared_ptr<RuleSet> set_ = std::make_shared<RuleSet>();
};

}  // namespace ptc
