#include "store/tensor/dtype.h"

#include <array>

#include "store/base/json.h"

namespace ptc {
namespace {

struct Row {
  DType dtype;
  std::string_view name;
  uint32_t bits;
  std::string_view npy;
};

constexpr std::array<Row, 22> kRows = {{
    {DType::kBool, "BOOL", 8, "|b1"},
    {DType::kU8, "U8", 8, "|u1"},
    {DType::kI8, "I8", 8, "|i1"},
    {DType::kF8E5M2, "F8_E5M2", 8, "|V1"},
    {DType::kF8E4M3, "F8_E4M3", 8, "|V1"},
    {DType::kF8E8M0, "F8_E8M0", 8, "|V1"},
    {DType::kF8E4M3Fnuz, "F8_E4M3FNUZ", 8, "|V1"},
    {DType::kF8E5M2Fnuz, "F8_E5M2FNUZ", 8, "|V1"},
    {DType::kI16, "I16", 16, "<i2"},
    {DType::kU16, "U16", 16, "<u2"},
    {DType::kF16, "F16", 16, "<f2"},
    {DType::kBF16, "BF16", 16, "|V2"},
    {DType::kI32, "I32", 32, "<i4"},
    {DType::kU32, "U32", 32, "<u4"},
    {DType::kF32, "F32", 32, "<f4"},
    {DType::kC64, "C64", 64, "<c8"},
    {DType::kF64, "F64", 64, "<f8"},
    {DType::kI64, "I64", 64, "<i8"},
    {DType::kU64, "U64", 64, "<u8"},
    {DType::kF4, "F4", 4, "|u1"},
    {DType::kF6E2M3, "F6_E2M3", 6, "|u1"},
    {DType::kF6E3M2, "F6_E3M2", 6, "|u1"},
}};

constexpr bool rows_are_in_enum_order() {
  for (size_t i = 0; i < kRows.size(); ++i)
    if (static_cast<size_t>(kRows[i].dtype) != i) return false;
  return true;
}
static_assert(rows_are_in_enum_order());

const Row& row_of(DType dtype) {
  PTC_CHECK(static_cast<size_t>(dtype) < kRows.size());
  return kRows[static_cast<size_t>(dtype)];
}

}  // namespace

Result<DType> parse_dtype(std::string_view name) {
  for (const Row& row : kRows)
    if (row.name == name) return row.dtype;
  return invalid_argument("unknown dtype {}; safetensors names such as BF16 and F32 are known",
                          quoted(name.substr(0, 40)));
}

std::string_view dtype_name(DType dtype) { return row_of(dtype).name; }
uint32_t dtype_bits(DType dtype) { return row_of(dtype).bits; }
std::string_view dtype_npy_descr(DType dtype) { return row_of(dtype).npy; }

Result<DType> dtype_of_npy_descr(std::string_view descr) {
  if (descr.size() >= 3 && std::string_view("<>=|").find(descr[0]) != std::string_view::npos) {
    std::string_view kind = descr.substr(1);
    if (kind == "V2" && descr[0] != '>') return DType::kBF16;
    for (const Row& row : kRows) {
      if (row.npy.substr(1) != kind || kind[0] == 'V') continue;
      if (row.bits > 8 && descr[0] == '>') {
        return invalid_argument(
            "{} is big-endian; save the array little-endian: "
            "array.astype(array.dtype.newbyteorder('<'))",
            quoted(descr));
      }
      return row.dtype;
    }
    if (kind == "V1") {
      return invalid_argument(
          "{} may be any 8-bit type; name it in the file's user attribute user.ptc.dtype "
          "(F8_E4M3, F8_E5M2, …)",
          quoted(descr));
    }
    if (kind[0] == 'O')
      return invalid_argument("{} is an array of Python objects, which is never loaded",
                              quoted(descr));
    if (kind[0] == 'S' || kind[0] == 'U' || kind[0] == 'a')
      return invalid_argument("{} is an array of text; only numbers are stored", quoted(descr));
  }
  return invalid_argument("NumPy type {} has no tensor type that equals it",
                          quoted(descr.substr(0, 40)));
}

}  // namespace ptc
