#include "store/tls/certificate_spans.h"

#include <fcntl.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <time.h>

#include <memory>

#include "store/base/file.h"

namespace ptc {
namespace {

/// 0: it says none.
int64_t certificate_seconds(const ASN1_TIME* time) {
  tm parts = {};
  return time != nullptr && ::ASN1_TIME_to_tm(time, &parts) == 1 ? ::timegm(&parts) : 0;
}

}  // namespace

Result<std::vector<CertificateSpan>> certificate_spans(const std::string& path) {
  constexpr size_t kMostBytes = 16 << 20;
  PTC_TRY(const std::string text, read_text_file(AT_FDCWD, path, kMostBytes));
  const std::unique_ptr<BIO, int (*)(BIO*)> bio(
      ::BIO_new_mem_buf(text.data(), static_cast<int>(text.size())), &::BIO_free);
  std::vector<CertificateSpan> spans;
  for (;;) {
    const std::unique_ptr<X509, void (*)(X509*)> certificate(
        ::PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr), &::X509_free);
    if (!certificate) break;
    spans.push_back({certificate_seconds(::X509_get0_notBefore(certificate.get())),
                     certificate_seconds(::X509_get0_notAfter(certificate.get()))});
  }
  ::ERR_clear_error();
  return spans;
}

}  // namespace ptc
