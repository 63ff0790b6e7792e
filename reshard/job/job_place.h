// Which job it is, where it lies, and what its parts use of their surroundings.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "reshard/intake/commit_share.h"
#include "reshard/job/job.h"
#include "reshard/job/job_record.h"
#include "store/base/error.h"

namespace ptc {

/// Does not change as long as the job is there, and outlives all its parts. Threads: any.
struct JobPlace {
  std::string name, id;
  std::string dir;  // jobs/<job>
  JobServices services;
  JobListener* listener = nullptr;  // null: nobody is told
  /// Of the key jobs/<name>, which nobody puts again; 0: existence() reads it. Copies share it.
  std::shared_ptr<std::atomic<int64_t>> revision = std::make_shared<std::atomic<int64_t>>(0);

  WhichJob which() const { return {name, id}; }
  /// This node's name in StoredImage::node and ImageLayout::node: empty where bytes lie on no
  /// other.
  std::string node_key() const {
    return services.cluster->shares_bytes() ? services.cluster->self() : std::string();
  }
  std::string incoming_dir() const { return dir + "/files/incoming"; }
  std::string checkpoint_dir(std::string_view checkpoint_id) const {
    return dir + "/checkpoints/" + std::string(checkpoint_id);
  }
  std::string leader_key() const { return "leaders/" + name; }
  std::string looked_key() const { return looked_key_of(name); }
  static std::string looked_key_of(std::string_view job) { return "looked/" + std::string(job); }
  CommitShare::Place commit_place(HashCache& hashes) const {
    return {dir, services.images, &hashes};
  }
  /// What every decision about the job rests on: it is there, and not another one made under its
  /// name since. kNotFound: it is not.
  Result<MetaTransaction::Compare> existence() const;

  /// A decision about the job: fails once this node's lease has ended, or with kNotFound once the
  /// job has.
  Result<int64_t> commit(MetaTransaction transaction) const;
  Result<int64_t> commit(JobDecision decision) const {
    return commit(std::move(decision).transaction());
  }
};

}  // namespace ptc
