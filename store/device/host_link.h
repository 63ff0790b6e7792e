// A link that is a socket, between two devices whose memory is the host's: for tests, and for
// programs that are to be tried where no device is.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "store/base/file.h"
#include "store/base/mutex.h"
#include "store/device/device_link.h"

namespace ptc {

/// Both ends are on this machine, in one process or in two. As with a device, nothing is done
/// before wait(). Threads: any.
class HostLinkMaker final : public DeviceLinkMaker {
 public:
  HostLinkMaker() : HostLinkMaker("host memory 1") {}
  explicit HostLinkMaker(std::string name) : name_(std::move(name)) {}

  ~HostLinkMaker() override;

  const std::string& name() const override { return name_; }
  /// A name under which a socket listens, until its end is made.
  Result<std::string> make_id() override;
  Result<std::unique_ptr<DeviceLink>> make(Device& device, const std::string& id, End end) override;

 private:
  const std::string name_;
  Mutex mutex_;
  std::map<std::string, UniqueFd> listening_ PTC_GUARDED_BY(mutex_);  // by id
};

}  // namespace ptc
