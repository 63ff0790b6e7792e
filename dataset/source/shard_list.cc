#include "dataset/source/shard_list.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <set>

#include "dataset/source/caught.h"
#include "dataset/source/fnv.h"
#include "dataset/source/folder_files.h"
#include "dataset/source/mds_json.h"
#include "dataset/source/own_files.h"
#include "dataset/source/path_pattern.h"
#include "store/base/json.h"

namespace ptc {
namespace {

constexpr size_t kMostTried = 1000;  // paths that saving source.json looks at

/// A path that source.json names: a root and what is below it.
struct NamedPath {
  std::string root, name;  // name: empty where the root itself is meant
  bool folder = false;
  std::string path() const { return name.empty() ? root : root + '/' + name; }
};

Error path_error(std::string_view path, std::string_view what) {
  return invalid_argument("{}: {}", ptc::quoted(path), what);
}

bool ends_with_any(std::string_view name, std::initializer_list<std::string_view> ends) {
  return std::any_of(ends.begin(), ends.end(), [&](auto end) { return name.ends_with(end); });
}

/// The name without the ending that says that it is compressed; empty: it is not.
std::string_view without_compression(std::string_view name) {
  if (name.ends_with(".tgz")) return "x.tar";
  for (std::string_view end : {".gz", ".zst", ".bz2", ".xz", ".lz4"})
    if (name.ends_with(end)) return name.substr(0, name.size() - end.size());
  return {};
}

Result<> refuse_compressed_name(std::string_view path) {
  const auto format = format_of_name(without_compression(path));
  if (!format) return ok();
  return path_error(
      path, fmt::format("a compressed shard cannot be read in the middle; decompress it (gunzip, "
                        "zstd -d), {} is then read as it is",
                        format_name(*format)));
}

Result<NamedPath> named_path(const SourceAccess& access, std::string root, std::string name) {
  NamedPath found{std::move(root), std::move(name)};
  PTC_TRY(const struct stat facts, access.stat(found.path()));
  found.folder = S_ISDIR(facts.st_mode);
  if (!found.folder && !S_ISREG(facts.st_mode))
    return path_error(found.path(), "neither a file nor a directory");
  return found;
}

/// What one text of "shards" stands for, braces expanded, by name.
Result<std::vector<NamedPath>> expand(const SourceAccess& access, std::string pattern,
                                      PathBudget& budget, const std::stop_token& stop) {
  const bool folders = pattern.ends_with('/');
  while (pattern.size() > 1 && pattern.ends_with('/')) pattern.pop_back();
  std::vector<NamedPath> found;
  const bool there = access.exists(pattern);
  if (there || !has_wildcards(pattern)) {
    const size_t slash = pattern.rfind('/');
    // As Megatron names its data: without ".bin" and ".idx".
    if (!there && access.exists(pattern + ".idx")) pattern += ".idx";
    const bool folder = access.is_folder(pattern);
    PTC_TRY(auto one, folder ? named_path(access, pattern, {})
                             : named_path(access, slash == 0 ? "/" : pattern.substr(0, slash),
                                          pattern.substr(slash + 1)));
    found.push_back(std::move(one));
    return found;
  }
  const size_t root_end = pattern.rfind('/', pattern.find_first_of("*?["));
  PTC_TRY(auto paths, matching_paths(access, folders ? pattern + '/' : pattern, budget, stop));
  if (paths.empty())
    return make_error(Code::kNotFound, "{}: no file matches", ptc::quoted(pattern));
  for (std::string& path : paths) {
    PTC_TRY(unless_stopped(stop));
    PTC_TRY(auto one, named_path(access, root_end == 0 ? "/" : pattern.substr(0, root_end),
                                 path.substr(root_end + 1)));
    found.push_back(std::move(one));
  }
  return found;
}

/// Each text of "shards" with its braces, unless there is a file of just that name.
Result<std::vector<BracePattern>> patterns_of(const SourceSpec& spec, const SourceAccess& access,
                                              PathBudget& budget, const std::stop_token& stop) {
  std::vector<BracePattern> patterns;
  for (const std::string& text : spec.shards) {
    PTC_TRY(unless_stopped(stop));
    const bool plain = text.find('{') == text.npos || access.exists(text);
    PTC_TRY(BracePattern pattern, plain ? BracePattern::literal(text) : BracePattern::parse(text));
    PTC_TRY(budget.take(pattern.count(), pattern.bytes()));
    patterns.push_back(std::move(pattern));
  }
  return patterns;
}

/// What lies in a directory, by the names of its files.
Result<SourceFormat> format_of_folder(const SourceAccess& access, const std::string& path,
                                      const std::stop_token& stop) {
  if (auto index = access.read_text(path + "/index.json", kMaxMdsIndexBytes);
      index && index.value().find("\"shards\"") != std::string::npos)
    return SourceFormat::kMds;
  PTC_TRY(const auto entries, entries_of(access, path, stop));
  std::set<SourceFormat> formats;
  bool others = false;
  for (const FolderEntry& entry : entries) {
    const std::string& name = entry.name;
    PTC_TRY(refuse_compressed_name(path + '/' + name));
    const auto format = format_of_name(name);
    const bool beside = ends_with_any(name, {".bin", ".json", ".txt", ".md", ".yaml"}) ||
                        name.find('.') == std::string::npos;
    if (format) formats.insert(*format);
    else others = others || !beside;
  }
  if (formats.empty()) return SourceFormat::kFiles;
  if (formats.size() > 1 || others) {
    return path_error(
        path,
        "holds files of several kinds; say which with \"format\", or name the shards with "
        "a glob");
  }
  return *formats.begin();
}

Result<SourceFormat> detect_format(const SourceAccess& access, const std::vector<NamedPath>& paths,
                                   const std::stop_token& stop) {
  std::optional<SourceFormat> format;
  for (const NamedPath& named : paths) {
    PTC_TRY(unless_stopped(stop));
    SourceFormat found;
    if (named.folder) {
      PTC_TRY(found, format_of_folder(access, named.path(), stop));
    } else {
      PTC_TRY(refuse_compressed_name(named.path()));
      const bool tokens = named.name.ends_with(".bin") &&
                          access.exists(named.path().substr(0, named.path().size() - 3) + "idx");
      found = tokens ? SourceFormat::kMegatron
                     : format_of_name(named.name).value_or(SourceFormat::kFiles);
    }
    if (format && *format != found) {
      return path_error(named.path(),
                        fmt::format("looks like {}, but what is before it like {}; say which with "
                                    "\"format\"",
                                    format_name(found), format_name(*format)));
    }
    format = found;
  }
  return *format;
}

/// Adds the shards that a path stands for.
class Lister {
 public:
  Lister(ShardList& list, const SourceAccess& access, const std::stop_token& stop)
      : list_(list), access_(access), stop_(stop) {}

  Result<> add(const NamedPath& named) {
    const uint32_t root = root_of(named.root);
    if (!named.folder || list_.format == SourceFormat::kFiles) {
      if (list_.format == SourceFormat::kMds)
        return path_error(named.path(), "name the directory of MDS shards, with its index.json");
      return shard(root, named.name);
    }
    if (list_.format == SourceFormat::kMds) return mds(root, named);
    PTC_TRY(const auto entries, entries_of(access_, named.path(), stop_));
    std::vector<std::string> names;
    for (const FolderEntry& entry : entries) {
      PTC_TRY(refuse_compressed_name(named.path() + '/' + entry.name));
      if (format_of_name(entry.name) == list_.format) names.push_back(entry.name);
    }
    std::sort(names.begin(), names.end());
    for (const std::string& name : names) {
      PTC_TRY(shard(root, below(named, name)));
    }
    return ok();
  }

 private:
  static std::string below(const NamedPath& named, const std::string& name) {
    return named.name.empty() ? name : named.name + '/' + name;
  }

  uint32_t root_of(const std::string& root) {
    const auto at = std::find(list_.roots.begin(), list_.roots.end(), root);
    if (at == list_.roots.end()) {
      list_.roots.push_back(root);
      return static_cast<uint32_t>(list_.roots.size() - 1);
    }
    return static_cast<uint32_t>(at - list_.roots.begin());
  }

  Result<> shard(uint32_t root, std::string name) {
    PTC_TRY(unless_stopped(stop_));
    ListedShard shard{.root = root, .name = std::move(name)};
    if (list_.format == SourceFormat::kMegatron) {
      const bool known = ends_with_any(shard.name, {".bin", ".idx"});
      if (!known) return path_error(shard.name, "a Megatron data set is a .bin and an .idx file");
      const std::string stem = shard.name.substr(0, shard.name.size() - 3);
      shard.name = stem + "bin";
      if (!seen_.insert(path_of(shard)).second) return ok();  // a glob that finds both
      if (auto stamp = stamp_at(access_, list_.roots[root] + '/' + stem + "idx"))
        shard.idx_stamp = stamp.value();
    } else if (!seen_.insert(path_of(shard)).second) {
      return path_error(path_of(shard), "is named twice in \"shards\"");
    }
    PTC_TRY(own_.refuse(path_of(shard)));
    // A shard that is not there is a bad shard: that is found when it is indexed.
    if (auto stamp = stamp_at(access_, path_of(shard))) shard.stamp = stamp.value();
    list_.shards.push_back(std::move(shard));
    return ok();
  }

  Result<> mds(uint32_t root, const NamedPath& named) {
    const std::string path = named.path() + "/index.json";
    PTC_TRY(const std::string text, access_.read_text(path, kMaxMdsIndexBytes));
    auto listing = parse_mds_json(text);
    if (!listing) return std::move(listing).error().with_context(ptc::quoted(path));
    if (list_.shards.empty()) list_.columns = listing.value().columns;
    if (list_.columns != listing.value().columns)
      return path_error(path, "has other columns than the directory before it");
    for (const auto& found : listing.value().shards) {
      PTC_TRY(shard(root, below(named, found.basename)));
      list_.shards.back().mds_samples = found.samples;
      list_.shards.back().mds_bytes = found.bytes;
    }
    return ok();
  }

  std::string path_of(const ListedShard& shard) const {
    return list_.roots[shard.root] + '/' + shard.name;
  }

  ShardList& list_;
  const SourceAccess& access_;
  const std::stop_token& stop_;
  OwnFiles own_;
  std::set<std::string> seen_;
};

void digest_stamp(Fnv& digest, const FileStamp& stamp) {
  digest.add(stamp.bytes).add(static_cast<uint64_t>(stamp.mtime_ns)).add(stamp.inode);
}

uint64_t digest_of(const ShardList& list, const SourceSpec& spec) {
  Fnv digest;
  digest.add(static_cast<uint64_t>(list.format))
      .add(static_cast<uint64_t>(spec.on_error) |
           static_cast<uint64_t>(spec.fingerprint_of_all_content) << 8)
      .add(spec.saved);
  for (const std::string& root : list.roots) digest.add(root);
  for (const MdsColumn& column : list.columns)
    digest.add(column.name)
        .add(column.encoding)
        .add(uint64_t{column.bytes.value_or(0)} + column.bytes.has_value());
  for (const ListedShard& shard : list.shards) {
    digest.add(uint64_t{shard.root}).add(shard.name).add(shard.mds_samples);
    digest_stamp(digest, shard.stamp);
    digest_stamp(digest, shard.idx_stamp);
  }
  return digest.value();
}

/// What a text names before its first glob character. What is not there is ok.
Result<> may_read_beginning(const SourceAccess& access, const std::string& pattern) {
  const bool literal = !has_wildcards(pattern) || access.exists(pattern);
  const std::string path =
      literal ? pattern : pattern.substr(0, pattern.rfind('/', pattern.find_first_of("*?[")) + 1);
  const auto facts = access.stat(path);
  Result<> good = facts ? Result<>(ok()) : Result<>(Error(facts.error()));
  if (facts && (S_ISREG(facts.value().st_mode) || S_ISDIR(facts.value().st_mode))) {
    const auto opened = access.open(path, Wanted::kFileOrFolder);
    if (!opened) good = Error(opened.error());
  }
  const bool bad = !good && (good.error().code() == Code::kPermissionDenied ||
                             good.error().errno_value() == ELOOP);
  return bad ? good : ok();
}

}  // namespace

std::optional<SourceFormat> format_of_name(std::string_view name) {
  if (name.ends_with(".tar")) return SourceFormat::kTar;
  if (name.ends_with(".mds")) return SourceFormat::kMds;
  if (ends_with_any(name, {".jsonl", ".ndjson"})) return SourceFormat::kJsonl;
  if (name.ends_with(".idx")) return SourceFormat::kMegatron;
  if (ends_with_any(name, {".tfrecord", ".tfrecords", ".tfrec"}) ||
      name.find(".tfrecord-") != std::string_view::npos)
    return SourceFormat::kTfrecord;
  return std::nullopt;
}

Result<ShardList> list_shards(const SourceSpec& spec, const SourceAccess& access,
                              const std::stop_token& stop) {
  PTC_TRY(const ActingAs as, access.act());
  std::vector<NamedPath> paths;
  OwnFiles own;
  PathBudget budget;
  const auto add = [&](const std::string& pattern) -> Result<bool> {
    PTC_TRY(unless_stopped(stop));
    PTC_TRY(own.refuse_pattern(pattern));
    PTC_TRY(auto found, expand(access, pattern, budget, stop));
    std::move(found.begin(), found.end(), std::back_inserter(paths));
    return true;
  };
  PTC_TRY(const auto patterns, patterns_of(spec, access, budget, stop));
  for (const BracePattern& pattern : patterns) {
    PTC_TRY(pattern.each(add));
  }
  ShardList list{.detected = !spec.format};
  if (spec.format) list.format = *spec.format;
  else {
    PTC_TRY(list.format, detect_format(access, paths, stop));
  }
  Lister lister(list, access, stop);
  for (const NamedPath& path : paths) {
    PTC_TRY(lister.add(path));
  }
  if (list.shards.empty()) {
    return make_error(Code::kNotFound, "{}: there is no {} shard",
                      ptc::quoted(paths.front().path()), format_name(list.format));
  }
  list.digest = digest_of(list, spec);
  return list;
}

Result<> check_source(const SourceSpec& spec, const SourceAccess& access,
                      const std::stop_token& stop, bool in_use) {
  PTC_TRY(const ActingAs as, access.act());
  OwnFiles own;
  PathBudget budget;
  size_t tried = 0;
  std::string first;  // that is not there
  bool any = false;
  const auto check = [&](const std::string& pattern) -> Result<bool> {
    PTC_TRY(unless_stopped(stop));
    PTC_TRY(own.refuse_pattern(pattern));
    PTC_TRY(may_read_beginning(access, pattern));
    if (has_wildcards(pattern) || access.exists(pattern)) any = true;
    else if (first.empty()) first = pattern;
    return ++tried < kMostTried;
  };
  PTC_TRY(const auto patterns, patterns_of(spec, access, budget, stop));
  for (const BracePattern& pattern : patterns) {
    PTC_TRY(const bool more, pattern.each(check));
    if (!more) break;
  }
  if (in_use && !any && !first.empty())
    return make_error(Code::kNotFound, "{} is not there", ptc::quoted(first));
  return ok();
}

}  // namespace ptc
