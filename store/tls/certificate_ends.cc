#include "store/tls/certificate_ends.h"

#include <fcntl.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <time.h>

#include <algorithm>
#include <memory>
#include <optional>

#include "store/base/file.h"

namespace ptc {

Result<CertificateEnds> certificate_ends(const std::string& path) {
  constexpr size_t kMostBytes = 16 << 20;
  PTC_TRY(const std::string text, read_text_file(AT_FDCWD, path, kMostBytes));
  const std::unique_ptr<BIO, int (*)(BIO*)> bio(
      ::BIO_new_mem_buf(text.data(), static_cast<int>(text.size())), &::BIO_free);
  std::optional<CertificateEnds> ends;
  for (;;) {
    const std::unique_ptr<X509, void (*)(X509*)> certificate(
        ::PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr), &::X509_free);
    if (!certificate) break;
    tm parts = {};
    if (::ASN1_TIME_to_tm(::X509_get0_notAfter(certificate.get()), &parts) != 1) continue;
    const int64_t end = ::timegm(&parts);
    if (!ends) ends = CertificateEnds{end, end};
    ends = CertificateEnds{std::min(ends->first, end), std::max(ends->last, end)};
  }
  ::ERR_clear_error();
  if (!ends) return invalid_argument("{} holds no certificate in PEM", path);
  return *ends;
}

}  // namespace ptc
