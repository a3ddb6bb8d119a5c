//! Memory and events of a buffer's messages.

use std::cell::RefCell;
use std::rc::Rc;

use cudarc::driver::CudaEvent;

use super::format::Format;
use super::memory::{DeviceMemory, Pinned};
use super::streams::Streams;
use crate::Result;

/// The memory and events that messages of a buffer need, made for the first one and kept with the
/// buffer.
#[derive(Default)]
pub(crate) struct MessageMemory {
    aware: Option<Rc<AwareMemory>>,
    staged: Option<Rc<StagedMemory>>,
    peers: Option<Rc<PeerEvents>>,
}

/// The events of operations of ranks that map each other's memory.
pub(crate) struct PeerEvents {
    /// Recorded after the computation with the buffer before it was lent.
    pub(crate) computed: CudaEvent,
    /// Recorded after the work of a leader.
    pub(crate) done: CudaEvent,
}

pub(crate) struct AwareMemory {
    pub(crate) inbox: DeviceMemory,
    pub(crate) inbox_len: usize,
    /// Recorded after the computation with the buffer before it was lent.
    pub(crate) computed: CudaEvent,
    /// Recorded after the last addition of each lane.
    pub(crate) added: [CudaEvent; 2],
}

pub(crate) struct StagedMemory {
    /// Pinned memory as long as the buffer, with values in its format.
    pub(crate) mirror: Pinned,
    /// Recorded after the computation with the buffer before it was lent.
    pub(crate) computed: CudaEvent,
    /// The copies of each chunk to the mirror.
    pub(crate) fetched: RefCell<Vec<Fetched>>,
    /// Recorded after the last copy from the mirror.
    pub(crate) delivered: CudaEvent,
}

/// The copies of one chunk to the mirror.
pub(crate) struct Fetched {
    pub(crate) event: CudaEvent,
    /// False if nothing of the chunk is sent.
    pub(crate) is_copied: bool,
}

impl MessageMemory {
    /// Returns the memory for messages of device memory, with an inbox of at least `inbox_len`
    /// values.
    ///
    /// # Errors
    /// The device is out of memory.
    pub(crate) fn aware(
        &mut self,
        streams: &Rc<Streams>,
        format: Format,
        inbox_len: usize,
    ) -> Result<Rc<AwareMemory>> {
        let fitting = self.aware.take().filter(|memory| memory.inbox_len >= inbox_len);
        let memory = match fitting {
            Some(memory) => memory,
            None => {
                let inbox = DeviceMemory::new(streams, inbox_len, format)?;
                inbox.keep();
                let (computed, added) = (streams.new_event()?, [streams.new_event()?, streams.new_event()?]);
                Rc::new(AwareMemory { inbox, inbox_len, computed, added })
            }
        };
        Ok(Rc::clone(self.aware.insert(memory)))
    }

    /// Returns the memory for staged messages of a buffer of `bytes` in at most `num_chunks`
    /// chunks.
    ///
    /// # Errors
    /// There is no pinned host memory left.
    pub(crate) fn staged(
        &mut self,
        streams: &Rc<Streams>,
        bytes: usize,
        num_chunks: usize,
    ) -> Result<Rc<StagedMemory>> {
        let memory = match self.staged.take() {
            Some(memory) => memory,
            None => Rc::new(StagedMemory {
                mirror: Pinned::new(streams, bytes.div_ceil(size_of::<f32>()))?,
                computed: streams.new_event()?,
                fetched: RefCell::default(),
                delivered: streams.new_event()?,
            }),
        };
        while memory.fetched.borrow().len() < num_chunks {
            let fetched = Fetched { event: streams.new_event()?, is_copied: false };
            memory.fetched.borrow_mut().push(fetched);
        }
        Ok(Rc::clone(self.staged.insert(memory)))
    }

    /// Returns the events of operations of ranks that map each other's memory.
    ///
    /// # Errors
    /// The driver makes no event.
    pub(crate) fn peers(&mut self, streams: &Rc<Streams>) -> Result<Rc<PeerEvents>> {
        let events = match self.peers.take() {
            Some(events) => events,
            None => Rc::new(PeerEvents { computed: streams.new_event()?, done: streams.new_event()? }),
        };
        Ok(Rc::clone(self.peers.insert(events)))
    }

    /// Returns the memory for staged messages, if there have been any.
    pub(crate) fn last_staged(&self) -> Option<&StagedMemory> {
        self.staged.as_deref()
    }
}
