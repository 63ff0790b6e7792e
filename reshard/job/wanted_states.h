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
/// Whether memories of devices are wanted, or have some of it: then a node that is alone has places
/// for ranks, too.
bool uses_devices(const Layout& wanted, const StoredState& stored);
/// Whether nodes have the devices that a layout names, or some of `nodes` any at all, whatever is
/// stored. kInvalidArgument, by node: one does not. kUnavailable: it does not say.
Result<> check_devices(const JobPlace& place, const Layout& wanted,
                       const std::vector<std::string>& nodes);
/// Under `wanted`. `nodes`: those that shall hold something; where it is to be in devices, ranks go
/// to those that have some. A rank for which there is none any more has its files in the host's
/// memory, until there is. kUnavailable: there is no node, or one does not say which devices it
/// has.
Result<WantedState> wanted_state(const JobPlace& place, const Checkpoint& checkpoint,
                                 const Layout& wanted, std::vector<std::string> nodes);
/// Of a checkpoint beside the newest: no layout is made of it any more, and its files stay where
/// they are; but it gets the copies that are asked for, and leaves nodes that shall hold nothing,
/// and the memory of devices.
Result<WantedState> where_it_is(const JobPlace& place, const CheckpointRecord& record,
                                uint32_t replicas, std::vector<std::string> nodes);

}  // namespace ptc
