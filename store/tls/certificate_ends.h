// When the certificates of a PEM file end, for whoever is to be told in time.
#pragma once

#include <cstdint>
#include <string>

#include "store/base/error.h"

namespace ptc {

/// Seconds since the epoch; of a file with several the first and the last to end.
struct CertificateEnds {
  int64_t first = 0, last = 0;
};

/// Reads the file. kInvalidArgument: no certificate is in it; else why it cannot be read.
Result<CertificateEnds> certificate_ends(const std::string& path);

}  // namespace ptc
