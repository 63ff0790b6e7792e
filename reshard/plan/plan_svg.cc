#include "reshard/plan/plan_svg.h"

#include <fmt/core.h>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <tuple>
#include <utility>

#include "store/base/size_text.h"

namespace ptc {
namespace {

// Pixels.
constexpr double kWidth = 1080, kMargin = 24, kLabels = 270, kBar = 12;
constexpr double kTop = 104, kBottom = 56;
constexpr double kLeft = kMargin + kLabels, kRight = kWidth - kMargin - kLabels;  // outer bar edges
constexpr double kGap = 6, kMinBar = 14, kMinColumn = 280, kThinnest = 0.6;
constexpr size_t kMaxTitle = 48;

constexpr std::string_view kStyle = R"(<style>
  .bar { fill: #465264 }
  .kept { fill: #8a95a3 }
  .local { fill: #2f7ed8 }
  .moved { fill: #d9730d }
  path { fill-opacity: .5 }
  path:hover { fill-opacity: .85 }
  @media (prefers-color-scheme: dark) {
    .bar { fill: #b4bfcc }
    .kept { fill: #8d98a6 }
    .local { fill: #58a0f0 }
    .moved { fill: #f0953f }
  }
</style>
)";

/// The length of the UTF-8 character that `text` begins with, if XML may hold it; else 0.
size_t xml_character(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  if (first < 0x80) return first >= 0x20 || first == '\t' || first == '\n' ? 1 : 0;
  const size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || text.size() < length) return 0;
  uint32_t code = first & (0xff >> (length + 1));
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
    code = code << 6 | (byte(i) & 0x3f);
  }
  const bool shortest = code >= (length == 4 ? 0x10000u : length == 3 ? 0x800u : 0x80u);
  const bool allowed =
      code <= 0x10ffff && (code < 0xd800 || code > 0xdfff) && (code & 0xfffe) != 0xfffe;
  return shortest && allowed ? length : 0;
}

/// At most `most` characters of it, and then "…".
std::string cut(std::string_view text, size_t most) {
  size_t characters = 0, end = 0;
  for (; end < text.size(); ++end) {
    if ((static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) continue;
    if (characters++ == most) return std::string(text.substr(0, end)) + "…";
  }
  return std::string(text);
}

struct Bar {
  double y = 0, height = 0;
  double used = 0;     // by the flows placed so far
  double squeeze = 1;  // < 1: thin flows, each with its least width, take more than the bar has
};

struct Kind {
  std::string_view style, name;
};
Kind kind_of(PlanPicture::Kind kind) {
  switch (kind) {
    case PlanPicture::Kind::kKept:
      return {"kept", "stays as it is"};
    case PlanPicture::Kind::kLocal:
      return {"local", "copied within its node"};
    case PlanPicture::Kind::kMoved:
      return {"moved", "moved between nodes"};
  }
  return {};
}

class Drawing {
 public:
  explicit Drawing(const PlanPicture& picture) : picture_(picture) {}

  std::string text() {
    place();
    const double height = kTop + column_ + kBottom;
    add("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{:.0f}\" height=\"{:.0f}\" "
        "viewBox=\"0 0 {:.0f} {:.0f}\">\n",
        kWidth, height, kWidth, height);
    out_ += kSvgStyle;
    out_ += kStyle;
    add("<title>{}</title>\n<rect class=\"ground\" width=\"100%\" height=\"100%\"/>\n",
        xml_escaped(title()));
    write(kMargin, 38, "title strong", "start", title());
    if (picture_.sources.empty() && picture_.targets.empty()) {
      write(kMargin, 62, "weak", "start", "Nothing has been resharded yet.");
    } else {
      write(kMargin, 62, "weak", "start", summary());
      write(kLeft + kBar, kTop - 14, "strong", "end", cut(picture_.from, kMaxTitle));
      write(kRight - kBar, kTop - 14, "strong", "start", cut(picture_.to, kMaxTitle));
      draw_flows();
      draw_bars(picture_.sources, left_, true);
      draw_bars(picture_.targets, right_, false);
      draw_legend(kTop + column_ + 34);
    }
    out_ += "</svg>\n";
    return std::move(out_);
  }

 private:
  template <class... T>
  void add(fmt::format_string<T...> format, T&&... values) {
    fmt::format_to(std::back_inserter(out_), format, std::forward<T>(values)...);
  }
  void write(double x, double y, std::string_view style, std::string_view anchor,
             std::string_view text) {
    add("<text x=\"{:.1f}\" y=\"{:.1f}\" class=\"{}\" text-anchor=\"{}\">{}</text>\n", x, y, style,
        anchor, xml_escaped(text));
  }

  std::string title() const {
    std::string what = cut(picture_.job, kMaxTitle);
    if (!picture_.checkpoint.empty()) what += " / " + cut(picture_.checkpoint, kMaxTitle);
    if (picture_.from.empty()) return what;
    return fmt::format("{}: {} → {}", what, cut(picture_.from, kMaxTitle),
                       cut(picture_.to, kMaxTitle));
  }
  std::string summary() const {
    return fmt::format("{} in {} files of the new layout, {} of them kept and {} written{}{}",
                       format_size(total_bytes_), picture_.kept_files + picture_.written_files,
                       picture_.kept_files, picture_.written_files,
                       picture_.remark.empty() ? "" : " · ", cut(picture_.remark, kMaxTitle));
  }

  /// Gives every block a bar as high as what it holds, or as what flows out of it if that is more
  /// (a source may serve several targets).
  void place() {
    std::vector<uint64_t> out(picture_.sources.size()), in(picture_.targets.size());
    for (const PlanPicture::Flow& flow : picture_.flows) {
      out[flow.source] += flow.bytes;
      in[flow.target] += flow.bytes;
    }
    auto weights = [](const std::vector<PlanPicture::Block>& blocks,
                      std::vector<uint64_t> flowing) {
      for (size_t i = 0; i < blocks.size(); ++i) flowing[i] = std::max(flowing[i], blocks[i].bytes);
      return flowing;
    };
    const std::vector<uint64_t> left = weights(picture_.sources, out);
    const std::vector<uint64_t> right = weights(picture_.targets, in);
    for (const PlanPicture::Block& block : picture_.targets) total_bytes_ += block.bytes;
    const uint64_t most =
        std::max({std::accumulate(left.begin(), left.end(), uint64_t{0}),
                  std::accumulate(right.begin(), right.end(), uint64_t{0}), uint64_t{1}});
    const size_t rows = std::max(left.size(), right.size());
    scale_ = std::max(kMinColumn, static_cast<double>(rows) * kMinBar) / static_cast<double>(most);
    left_ = stack(left);
    right_ = stack(right);
    centre(left_);
    centre(right_);
  }
  std::vector<Bar> stack(const std::vector<uint64_t>& weights) {
    std::vector<Bar> bars;
    double y = kTop;
    for (uint64_t weight : weights) {
      bars.push_back({y, std::max(kMinBar, static_cast<double>(weight) * scale_)});
      y += bars.back().height + kGap;
    }
    column_ = std::max(column_, y - kGap - kTop);
    return bars;
  }
  void centre(std::vector<Bar>& bars) const {
    if (bars.empty()) return;
    const double free = (kTop + column_ - bars.back().y - bars.back().height) / 2;
    for (Bar& bar : bars) bar.y += free;
  }

  double width_of(const PlanPicture::Flow& flow) const {
    return std::max(kThinnest, static_cast<double>(flow.bytes) * scale_);
  }

  void draw_flows() {
    // Ordered at both ends by where the other end is, flows of one bar do not cross each other.
    struct Band {
      const PlanPicture::Flow* flow;
      double from, to;  // upper edges
      double from_width, to_width;
    };
    std::vector<Band> bands;
    for (const PlanPicture::Flow& flow : picture_.flows) bands.push_back({&flow, 0, 0, 0, 0});
    for (const Band& band : bands) {
      left_[band.flow->source].used += width_of(*band.flow);
      right_[band.flow->target].used += width_of(*band.flow);
    }
    for (std::vector<Bar>* bars : {&left_, &right_}) {
      for (Bar& bar : *bars) {
        bar.squeeze = bar.used > bar.height ? bar.height / bar.used : 1;
        bar.used = std::max(0.0, bar.height - bar.used) / 2;  // in the middle of its bar
      }
    }
    auto by = [](auto key) {
      return [key](const Band& a, const Band& b) { return key(*a.flow) < key(*b.flow); };
    };
    auto take = [](Bar& bar, double width, double& edge, double& taken) {
      edge = bar.y + bar.used;
      taken = width * bar.squeeze;
      bar.used += taken;
    };
    std::sort(bands.begin(), bands.end(), by([](const PlanPicture::Flow& flow) {
                return std::tuple(flow.source, flow.target, flow.kind);
              }));
    for (Band& band : bands)
      take(left_[band.flow->source], width_of(*band.flow), band.from, band.from_width);
    std::sort(bands.begin(), bands.end(), by([](const PlanPicture::Flow& flow) {
                return std::tuple(flow.target, flow.source, flow.kind);
              }));
    for (Band& band : bands)
      take(right_[band.flow->target], width_of(*band.flow), band.to, band.to_width);
    // Wide ones first, so that thin ones lie on top of them.
    std::stable_sort(bands.begin(), bands.end(),
                     [](const Band& a, const Band& b) { return a.flow->bytes > b.flow->bytes; });

    const double x0 = kLeft + kBar, x1 = kRight - kBar, middle = (x0 + x1) / 2;
    for (const Band& band : bands) {
      const PlanPicture::Flow& flow = *band.flow;
      const Kind kind = kind_of(flow.kind);
      add("<path class=\"{}\" d=\"M{:.1f} {:.2f}C{:.1f} {:.2f} {:.1f} {:.2f} {:.1f} {:.2f}V{:.2f}"
          "C{:.1f} {:.2f} {:.1f} {:.2f} {:.1f} {:.2f}Z\"><title>{} → {}: {} {}</title></path>\n",
          kind.style, x0, band.from, middle, band.from, middle, band.to, x1, band.to,
          band.to + band.to_width, middle, band.to + band.to_width, middle,
          band.from + band.from_width, x0, band.from + band.from_width,
          xml_escaped(picture_.sources[flow.source].label),
          xml_escaped(picture_.targets[flow.target].label), format_size(flow.bytes), kind.name);
    }
  }

  void draw_bars(const std::vector<PlanPicture::Block>& blocks, const std::vector<Bar>& bars,
                 bool left) {
    const double x = left ? kLeft : kRight - kBar;
    for (size_t i = 0; i < blocks.size(); ++i) {
      add("<rect class=\"bar\" x=\"{:.1f}\" y=\"{:.2f}\" width=\"{:.0f}\" height=\"{:.2f}\" "
          "rx=\"2\"/>\n",
          x, bars[i].y, kBar, bars[i].height);
      const std::string rest =
          (blocks[i].detail.empty() ? "" : blocks[i].detail + " · ") + format_size(blocks[i].bytes);
      add("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\"><tspan class=\"strong\">{}</tspan>"
          "<tspan class=\"weak\" dx=\"8\">{}</tspan></text>\n",
          left ? x - 8 : x + kBar + 8, bars[i].y + bars[i].height / 2 + 4.2, left ? "end" : "start",
          xml_escaped(cut(blocks[i].label, 24)), xml_escaped(cut(rest, 32)));
    }
  }

  void draw_legend(double y) {
    double x = kMargin;
    auto entry = [&](std::string_view style, const std::string& text, double columns) {
      add("<rect class=\"{}\" x=\"{:.1f}\" y=\"{:.1f}\" width=\"14\" height=\"10\" rx=\"2\"/>\n",
          style, x, y - 9);
      write(x + 20, y, "strong", "start", text);
      x += columns;
    };
    entry("kept", fmt::format("{} stay as they are", format_size(picture_.kept_bytes)), 230);
    entry("local", fmt::format("{} copied within a node", format_size(picture_.local_bytes)), 260);
    entry("moved",
          fmt::format("{} moved between nodes; {} is the least possible",
                      format_size(picture_.moved_bytes), format_size(picture_.minimum_bytes)),
          0);
  }

  const PlanPicture& picture_;
  std::string out_;
  double scale_ = 0, column_ = 0;
  uint64_t total_bytes_ = 0;  // of the new layout
  std::vector<Bar> left_, right_;
};

}  // namespace

std::string xml_escaped(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const size_t length = xml_character(text);
    switch (length == 1 ? text[0] : 0) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        out += length == 0 ? "\xef\xbf\xbd" : text.substr(0, length);
    }
    text.remove_prefix(std::max<size_t>(length, 1));
  }
  return out;
}

std::string plan_svg(const PlanPicture& picture) { return Drawing(picture).text(); }

}  // namespace ptc
