// A plan as a picture: what the old layout's files hold on the left, the new layout's files on the
// right, and between them flows as wide as their bytes. A pure function to SVG text.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace ptc {

/// What is drawn. Texts may be anything: they are escaped, and cut where they are too long.
struct PlanPicture {
  /// The files of some ranks, as one bar. With more than about 64 a side the labels get small;
  /// callers put several together before that.
  struct Block {
    std::string label;   // "ranks 0, 4"
    std::string detail;  // "tp 0, pp 1"
    uint64_t bytes = 0;
  };
  enum class Kind : uint8_t {
    kKept,
    kLocal,
    kMoved
  };  // stays; copied within a node; between nodes
  struct Flow {
    uint32_t source = 0;  // into sources
    uint32_t target = 0;  // into targets
    Kind kind = Kind::kLocal;
    uint64_t bytes = 0;
  };

  std::string job, checkpoint;
  std::string from, to;  // layouts
  std::string remark;    // "running", "done in 2.1 s"
  std::vector<Block> sources, targets;
  std::vector<Flow> flows;  // in any order
  uint64_t kept_bytes = 0, local_bytes = 0, moved_bytes = 0, minimum_bytes = 0;
  uint32_t kept_files = 0, written_files = 0;
};

/// An SVG document of its own, legible on light and on dark. Without sources and targets it says
/// that nothing was ever moved.
std::string plan_svg(const PlanPicture& picture);

/// What pictures have in common: texts (title, strong, weak) and the ground, light and dark.
inline constexpr std::string_view kSvgStyle = R"(<style>
  text { font-family: system-ui, "DejaVu Sans", Helvetica, Arial, sans-serif; font-size: 12px }
  .title { font-size: 17px; font-weight: 600 }
  .ground { fill: #ffffff }
  .strong { fill: #1c2430 }
  .weak { fill: #5a6675 }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #14181f }
    .strong { fill: #e8ecf1 }
    .weak { fill: #9aa6b4 }
  }
</style>
)";

/// `text` inside XML: markup escaped; what XML cannot hold (control characters, what is not UTF-8)
/// becomes U+FFFD.
std::string xml_escaped(std::string_view text);

}  // namespace ptc
