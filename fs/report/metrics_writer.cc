#include "fs/report/metrics_writer.h"

#include <fmt/format.h>

#include <iterator>

namespace ptc {

void MetricsWriter::family(std::string_view name, std::string_view type, std::string_view help) {
  name_ = name;
  fmt::format_to(std::back_inserter(text_), "# HELP {0} {1}\n# TYPE {0} {2}\n", name, help, type);
}

void MetricsWriter::name_and_labels(std::string_view name, Labels labels) {
  text_ += name;
  char before = '{';
  for (const auto& [label, value] : labels) {
    text_ += before;
    text_.append(label).append("=\"");
    for (char c : value) {
      if (c == '\n') {
        text_ += "\\n";
      } else {
        if (c == '"' || c == '\\') text_ += '\\';
        text_ += c;
      }
    }
    text_ += '"';
    before = ',';
  }
  text_ += labels.size() == 0 ? " " : "} ";
}

void MetricsWriter::write(std::string_view name, Labels labels, uint64_t value) {
  name_and_labels(name, labels);
  fmt::format_to(std::back_inserter(text_), "{}\n", value);
}

void MetricsWriter::write(std::string_view name, Labels labels, double value) {
  name_and_labels(name, labels);
  fmt::format_to(std::back_inserter(text_), "{}\n", value);
}

void MetricsWriter::histogram(std::string_view label, std::string_view value,
                              std::span<const double> ends, std::span<const uint64_t> counts,
                              double sum) {
  uint64_t below = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    below += counts[i];
    const std::string end = i < ends.size() ? fmt::format("{}", ends[i]) : "+Inf";
    write(name_ + "_bucket", {{label, value}, {"le", end}}, below);
  }
  write(name_ + "_sum", {{label, value}}, sum);
  write(name_ + "_count", {{label, value}}, below);
}

}  // namespace ptc
