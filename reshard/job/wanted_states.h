// How a job's checkpoints shall be stored, by what is known of the job and of the nodes. No state;
// threads: any.
#pragma once

#include <string>
#include <vector>

#include "reshard/job/job_place.h"
#include "reshard/job/known_job.h"
#include "reshard/move/change.h"
#include "store/base/error.h"

namespace ptc {

/// Alive and not drained; alone: none is named.
std::vector<std::string> nodes_in_service(const JobPlace& place, const KnownJob& known);
/// Under `wanted`. `nodes`: those that shall hold something. kUnavailable: there is none.
Result<WantedState> wanted_state(const JobPlace& place, const Checkpoint& checkpoint,
                                 const Layout& wanted, std::vector<std::string> nodes);
/// Of a checkpoint beside the newest: no layout is made of it any more, and its files stay where
/// they are; but it gets the copies that are asked for, and leaves nodes that shall hold nothing.
Result<WantedState> where_it_is(const CheckpointRecord& record, uint32_t replicas,
                                std::vector<std::string> nodes);

}  // namespace ptc
