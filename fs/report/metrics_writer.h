// Prometheus' text format (version 0.0.4), as Prometheus and `promtool check metrics` want it.
#pragma once

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace ptc {

/// Builds one text: a family by family(), then its samples. Label values may be any UTF-8.
class MetricsWriter {
 public:
  using Labels = std::initializer_list<std::pair<std::string_view, std::string_view>>;

  /// `type`: counter, gauge or histogram. Counters are named …_total.
  void family(std::string_view name, std::string_view type, std::string_view help);
  template <class Number>
  requires std::integral<Number> || std::floating_point<Number>
  void sample(Labels labels, Number value) {
    if constexpr (std::integral<Number>) write(name_, labels, static_cast<uint64_t>(value));
    else write(name_, labels, static_cast<double>(value));
  }
  /// One histogram: its buckets' upper ends, and how many were in each, with those above all as one
  /// more; the sum of all that was counted.
  void histogram(std::string_view label, std::string_view value, std::span<const double> ends,
                 std::span<const uint64_t> counts, double sum);

  /// A family of one sample.
  template <class Number>
  void single(std::string_view name, std::string_view type, std::string_view help, Number value) {
    family(name, type, help);
    sample({}, value);
  }

  std::string take() { return std::move(text_); }

 private:
  void write(std::string_view name, Labels labels, uint64_t value);
  void write(std::string_view name, Labels labels, double value);
  void name_and_labels(std::string_view name, Labels labels);

  std::string name_, text_;
};

}  // namespace ptc
