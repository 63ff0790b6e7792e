// Changes to layout.json that are given as options: --tp 2 --stages 16,16.
#pragma once

#include <CLI/CLI.hpp>
#include <boost/json/object.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "store/base/error.h"
#include "store/base/json.h"

namespace ptc::cli {

/// What takes a list out of the layout: ptcfs finds one.
inline constexpr std::string_view kEven = "even", kAuto = "auto";
/// Of rules: those of the commit.
inline constexpr std::string_view kNoRules = "none";
/// Of what state is cut over: that alone.
inline constexpr std::string_view kDpAlone = "dp";

/// The fields that were given.
struct LayoutEdit {
  std::optional<uint32_t> tp, pp, dp, ep, etp, cp, vpp, dp_shard;
  std::vector<std::string> stages;  // numbers, or kEven
  std::optional<std::string> order, naming, optimizer, rules;
  std::vector<std::string> devices;     // or kAuto
  std::vector<std::string> shard_over;  // or kDpAlone
  std::optional<uint32_t> replicas, keep;
  std::optional<std::string> memory;

  bool empty() const;
};

/// Adds --tp … --stages to a subcommand; with `all`, also the fields that do not cut tensors.
void add_layout_options(CLI::App& app, LayoutEdit& edit, bool all);

/// `layout` with the fields of `edit` replaced and the others as they were, in their order. What no
/// longer fits the new sizes ("stages", "devices") is left out, and `notes` says so.
json::object edited_layout(json::object layout, const LayoutEdit& edit,
                           std::vector<std::string>& notes);

/// Sets the sizes in `layout` to those of a layout's name, "tp4-pp2-dp2-ep4". Unknown parts of the
/// name are passed over.
void set_sizes_of_name(json::object& layout, std::string_view name);

/// A layout.json for a name without a "+" suffix, its "rules" as an id; kInvalidArgument for
/// anything else.
Result<json::object> layout_of_name(std::string_view name);

/// The same; the error says which name may be meant.
Result<json::object> layout_named(const std::string& text);

/// Reads a layout from a file, or, if `text` is a layout's name, from that.
Result<json::object> layout_of_file_or_name(const std::string& text);

}  // namespace ptc::cli
