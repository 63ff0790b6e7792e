#include "dataset/tree/sample_form.h"

#include <algorithm>

#include "dataset/source/masked_crc.h"
#include "dataset/tree/tar_header.h"

namespace ptc {
namespace {

/// What follows the key of a sample that the file has already: "-1", "-2" …
std::string repeat_suffix(uint64_t repeat) { return repeat == 0 ? "" : fmt::format("-{}", repeat); }
std::string member_name(uint64_t id, uint64_t repeat, std::string_view field) {
  return fmt::format("{}{}.{}", id, repeat_suffix(repeat), field);
}

/// The bytes of the shard as they are.
class AsItIs : public SampleForm {
 public:
  uint64_t bytes(const SampleSource& source, uint64_t id, uint64_t) const override {
    return source.extent(id).bytes + source.lacks_newline(id);
  }
  Result<> render(const SampleSource& source, uint64_t id, uint64_t,
                  Window& window) const override {
    PTC_TRY(window.run(source.extent(id)));
    if (source.lacks_newline(id)) window.literal("\n");
    return ok();
  }
};

/// The same of a tar, where a sample that is there once more has another key.
class AsItIsInTar : public AsItIs {
 public:
  Result<> render(const SampleSource& source, uint64_t id, uint64_t repeat,
                  Window& window) const override {
    if (repeat == 0) return AsItIs::render(source, id, repeat, window);
    PTC_TRY(auto fields, source.fields(id));
    std::sort(fields.begin(), fields.end(),
              [](const Field& a, const Field& b) { return a.extent.offset < b.extent.offset; });
    const Extent sample = source.extent(id);
    uint64_t at = sample.offset;
    for (const Field& field : fields) {
      const uint64_t header = field.extent.offset - kTarBlockBytes;
      PTC_TRY(window.run({sample.shard, at, header - at}));
      if (window.wants(kTarBlockBytes)) {
        std::string block(kTarBlockBytes, '\0');
        PTC_TRY(source.read(sample.shard, header, std::as_writable_bytes(std::span(block))));
        add_to_key(block, field.name, repeat_suffix(repeat));
        window.literal(block);
      } else {
        window.skip(kTarBlockBytes);
      }
      at = field.extent.offset;
    }
    return window.run({sample.shard, at, sample.offset + sample.bytes - at});
  }
};

/// Each field a member.
class AsTarMembers : public SampleForm {
 public:
  uint64_t bytes(const SampleSource& source, uint64_t id, uint64_t repeat) const override {
    uint64_t headers = 0;
    const uint64_t id_bytes = member_name(id, repeat, "").size();
    if (source.format() == SourceFormat::kFiles)
      headers = tar_header_bytes(id_bytes + source.file_extension_of(id).size());
    else
      for (const std::string& name : source.field_names())
        headers += tar_header_bytes(id_bytes + name.size());
    return headers + *source.payload_blocks(id) * kTarBlockBytes;
  }
  Result<> render(const SampleSource& source, uint64_t id, uint64_t repeat,
                  Window& window) const override {
    PTC_TRY(const auto payloads, payloads_of(source, id));
    for (const Payload& payload : payloads) {
      const std::string name = member_name(id, repeat, payload.name);
      const uint64_t header_bytes = tar_header_bytes(name.size());
      if (window.wants(header_bytes)) window.literal(tar_header(name, payload.bytes()));
      else window.skip(header_bytes);
      PTC_TRY(render_payload(payload, window));
      window.zeros(tar_padding(payload.bytes()));
    }
    return ok();
  }
};

/// The lengths of the fields, then the fields.
class AsMdsSample : public SampleForm {
 public:
  uint64_t bytes(const SampleSource& source, uint64_t id, uint64_t) const override {
    return 4 * source.field_names().size() + source.payload_bytes(id);
  }
  Result<> render(const SampleSource& source, uint64_t id, uint64_t,
                  Window& window) const override {
    PTC_TRY(const auto payloads, payloads_of(source, id));
    window.numbers<uint32_t>(
        payloads.size(), [&](uint64_t i) { return static_cast<uint32_t>(payloads[i].bytes()); });
    for (const Payload& payload : payloads) {
      PTC_TRY(render_payload(payload, window));
    }
    return ok();
  }
};

/// The one field in a frame.
class AsTfrecord : public SampleForm {
 public:
  bool reads_back() const override { return true; }
  uint64_t bytes(const SampleSource& source, uint64_t id, uint64_t) const override {
    return kTfrecordFrameBytes + source.payload_bytes(id);
  }
  Result<> render(const SampleSource& source, uint64_t id, uint64_t,
                  Window& window) const override {
    PTC_TRY(const auto payloads, payloads_of(source, id));
    const Payload& payload = payloads.front();
    const uint64_t length = payload.bytes();
    window.numbers<uint64_t>(1, [&](uint64_t) { return length; });
    window.numbers<uint32_t>(
        1, [&](uint64_t) { return masked_crc(std::as_bytes(std::span(&length, 1))); });
    PTC_TRY(render_payload(payload, window));
    if (!window.wants(4)) {
      window.skip(4);
      return ok();
    }
    PTC_TRY(const auto rendered, window.last(length));
    uint32_t crc = mask_crc(crc32c(rendered, 0));
    if (rendered.size() < length) {
      PTC_TRY(crc, crc_of(source, payload));
    }
    window.numbers<uint32_t>(1, [&](uint64_t) { return crc; });
    return ok();
  }

 private:
  static Result<uint32_t> crc_of(const SampleSource& source, const Payload& payload) {
    std::vector<std::byte> buffer(std::min<uint64_t>(payload.extent.bytes, 256 << 10));
    uint32_t crc = 0;
    for (uint64_t done = 0; done < payload.extent.bytes; done += buffer.size()) {
      buffer.resize(std::min<uint64_t>(buffer.size(), payload.extent.bytes - done));
      PTC_TRY(source.read(payload.extent.shard, payload.extent.offset + done, buffer));
      crc = crc32c(buffer, crc);
    }
    constexpr std::byte kNewline{'\n'};
    if (payload.newline) crc = crc32c(std::span(&kNewline, 1), crc);
    return mask_crc(crc);
  }
};

}  // namespace

const SampleForm& form_of(TreeKind kind, SourceFormat format) {
  static const AsItIs as_it_is;
  static const AsItIsInTar as_it_is_in_tar;
  static const AsTarMembers as_tar_members;
  static const AsMdsSample as_mds_sample;
  static const AsTfrecord as_tfrecord;
  const bool same = tree_name(kind) == format_name(format);
  if (same && kind == TreeKind::kTar) return as_it_is_in_tar;
  if (same) return as_it_is;
  if (kind == TreeKind::kTar) return as_tar_members;
  if (kind == TreeKind::kMds) return as_mds_sample;
  PTC_CHECK(kind == TreeKind::kTfrecord);
  return as_tfrecord;
}

Result<std::vector<Payload>> payloads_of(const SampleSource& source, uint64_t id) {
  PTC_TRY(auto fields, source.fields(id));
  std::vector<Payload> payloads;
  for (Field& field : fields) payloads.push_back({std::move(field.name), field.extent});
  if (source.lacks_newline(id)) payloads.back().newline = true;
  std::sort(payloads.begin(), payloads.end(),
            [](const Payload& a, const Payload& b) { return a.name < b.name; });
  return payloads;
}

Result<> render_payload(const Payload& payload, Window& window) {
  PTC_TRY(window.run(payload.extent));
  if (payload.newline) window.literal("\n");
  return ok();
}

std::vector<MdsColumn> columns_of(const SampleSource& source) {
  std::vector<MdsColumn> columns = source.mds_columns();
  if (!columns.empty()) return columns;
  for (const std::string& name : source.field_names()) columns.push_back({name, "bytes", {}});
  return columns;
}

}  // namespace ptc
