//! [`Providing`]: a rank other than 0 sends its parts of the state when rank 0 asks for them.

use super::copy::StateCopy;
use crate::comm::{Background, Communicator, Pending};
use crate::memory::Memory;

/// The tag of the requests of rank 0: the number of a bundle, or [`END`].
pub(super) const REQUEST: i32 = 0;

/// The tag of the values of a bundle.
pub(super) const VALUES: i32 = 1;

/// The request after which no other follows.
pub(super) const END: i64 = -1;

/// The task of a rank that provides parts.
pub(super) struct Providing {
    channel: Communicator,
    /// The copy of this rank's parts.
    pub(super) copy: StateCopy,
    /// The next request, if rank 0 is writing a checkpoint.
    request: Option<Pending<Vec<i64>>>,
    /// The bundles that are being sent.
    sending: Vec<(usize, Pending<Memory<f32>>)>,
    /// The number of requests so far.
    num_requests: u64,
}

impl Providing {
    pub(super) fn new(channel: Communicator, copy: StateCopy) -> Providing {
        Providing { channel, copy, request: None, sending: Vec::new(), num_requests: 0 }
    }

    /// Waits for requests from now on, until [`END`].
    pub(super) fn begin(&mut self) {
        self.request = Some(self.receive_request());
    }

    /// Returns true if no request is to come, and nothing is being sent.
    pub(super) fn is_done(&self) -> bool {
        self.request.is_none() && self.sending.is_empty()
    }

    /// Returns the number of requests so far, which shows progress.
    pub(super) fn num_requests(&self) -> u64 {
        self.num_requests
    }

    fn receive_request(&self) -> Pending<Vec<i64>> {
        let request = self.channel.start_receive(vec![0], 0, REQUEST);
        request.expect("rank 0 and the tag exist, and host memory needs no staging")
    }

    fn finish_sends(&mut self, is_finished: impl Fn(usize, &mut Pending<Memory<f32>>) -> bool) {
        for at in (0..self.sending.len()).rev() {
            let (bundle, sending) = &mut self.sending[at];
            if is_finished(*bundle, sending) {
                let (bundle, sending) = self.sending.swap_remove(at);
                self.copy.put(bundle, sending.wait());
            }
        }
    }
}

impl Background for Providing {
    fn advance(&mut self) -> bool {
        self.finish_sends(|_, sending| sending.test());
        while let Some(mut request) = self.request.take() {
            if !request.test() {
                self.request = Some(request);
                break;
            }
            self.num_requests += 1;
            let bundle = request.wait()[0];
            if bundle == END {
                break;
            }
            let bundle = bundle as usize;
            // rank 0 has received the bundle before, if it asks again
            self.finish_sends(|other, _| other == bundle);
            let values = self.copy.take(bundle).expect("no send of the bundle is under way");
            let sending = self.channel.start_send(values, 0, VALUES);
            self.sending.push((bundle, sending.expect("rank 0 and the tag exist")));
            self.request = Some(self.receive_request());
        }
        self.is_done()
    }
}
