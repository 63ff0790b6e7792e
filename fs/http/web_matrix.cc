#include "fs/http/web_matrix.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <boost/json/object.hpp>
#include <boost/json/value.hpp>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <map>
#include <string_view>
#include <utility>
#include <vector>

#include "fs/http/web_page.h"
#include "store/base/size_text.h"

namespace ptc {
namespace {

namespace json = boost::json;

constexpr std::array<std::string_view, 3> kKinds = {"kept", "local", "moved"};
constexpr size_t kDense = 9;  // columns from which on cells are narrow
constexpr int kHeats = 4;

struct Cell {
  std::array<uint64_t, kKinds.size()> bytes{};
  uint64_t total() const { return bytes[0] + bytes[1] + bytes[2]; }
  size_t main_kind() const {
    return static_cast<size_t>(std::max_element(bytes.begin(), bytes.end()) - bytes.begin());
  }
};

/// "rank 2" comes before "rank 10", "node" before both.
std::pair<uint64_t, std::string> order_of(const std::string& label) {
  const size_t digit = label.find_first_of("0123456789");
  uint64_t number = 0;
  if (digit != std::string::npos)
    std::from_chars(label.data() + digit, label.data() + label.size(), number);
  return {number, label};
}

/// "1.5 GiB", or "1.5G", "258M" where there is little room.
std::string size_text(uint64_t bytes, bool dense) {
  const std::string text = format_size(bytes);
  if (!dense) return text;
  const size_t space = text.find(' '), point = text.find('.');
  const std::string unit = text.ends_with("iB") ? text.substr(space + 1, 1) : "";
  return text.substr(0, point != std::string::npos && point >= 2 ? point : space) + unit;
}

}  // namespace

std::string html_matrix(const json::array& flows) {
  std::map<std::pair<uint64_t, std::string>, std::map<std::pair<uint64_t, std::string>, Cell>> rows;
  std::map<std::pair<uint64_t, std::string>, int> columns;
  for (const json::value& value : flows) {
    const json::object& flow = value.as_object();
    const auto source = order_of(std::string(flow.at("source").as_string()));
    const auto target = order_of(std::string(flow.at("target").as_string()));
    const auto kind = std::find(kKinds.begin(), kKinds.end(), flow.at("kind").as_string());
    columns[target];
    if (kind == kKinds.end()) continue;
    rows[source][target].bytes[static_cast<size_t>(kind - kKinds.begin())] +=
        flow.at("bytes").to_number<uint64_t>();
  }
  if (rows.empty()) return "";
  uint64_t most = 1;
  for (const auto& [source, cells] : rows)
    for (const auto& [target, cell] : cells) most = std::max(most, cell.total());

  const bool dense = columns.size() >= kDense;
  std::string html = fmt::format(
      "<div class=\"scroll\"><table class=\"matrix{}\">\n<thead><tr><th "
      "scope=\"col\">from \\ to</th>",
      dense ? " dense" : "");
  for (const auto& [target, unused] : columns)
    html += fmt::format("<th scope=\"col\"><span>{}</span></th>", html_escaped(target.second));
  html += "</tr></thead>\n<tbody>\n";
  for (const auto& [source, cells] : rows) {
    html += fmt::format("<tr><th scope=\"row\">{}</th>", html_escaped(source.second));
    for (const auto& [target, unused] : columns) {
      const auto cell = cells.find(target);
      if (cell == cells.end() || cell->second.total() == 0) {
        html += "<td></td>";
        continue;
      }
      std::string title = fmt::format("{} → {}:", source.second, target.second);
      for (size_t kind = 0; kind < kKinds.size(); ++kind)
        if (cell->second.bytes[kind] > 0)
          title += fmt::format(" {} {}", format_size(cell->second.bytes[kind]), kKinds[kind]);
      const double share = static_cast<double>(cell->second.total()) / static_cast<double>(most);
      html += fmt::format("<td class=\"{} heat{}\" title=\"{}\">{}</td>",
                          kKinds[cell->second.main_kind()],
                          std::clamp(static_cast<int>(std::ceil(share * kHeats)), 1, kHeats),
                          html_escaped(title), size_text(cell->second.total(), dense));
    }
    html += "</tr>\n";
  }
  return html + "</tbody></table></div>\n";
}

}  // namespace ptc
