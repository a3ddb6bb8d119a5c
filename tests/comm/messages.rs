//! Point-to-point messages, and messages of more elements than a C `int` counts.

use std::cell::RefCell;
use std::rc::Rc;

use phalanx::comm::{Background, Communicator, Operation, Pending, World, advance, attach};
use phalanx::memory::free_bytes;

pub fn point_to_point(world: &World) {
    let c = world.communicator();
    match c.rank() {
        0 => {
            c.send(&[43523], 1, 7).unwrap();
            c.start_send(vec![43523, 1], 1, 8).unwrap().wait();
            c.send(&[1_u8; 9], 1, 9).unwrap();
            c.send(&[1_u8; 9], 1, 10).unwrap();
        }
        1 => {
            let mut number = [0; 4];
            assert_eq!(c.receive(&mut number, 0, 7).unwrap(), 1, "fewer than the buffer holds is fine");
            assert_eq!(number, [43523, 0, 0, 0]);
            assert_eq!(c.start_receive(vec![0; 3], 0, 8).unwrap().wait(), [43523, 1, 0]);
            let error = c.receive(&mut [0_u8; 8], 0, 9).unwrap_err().to_string();
            assert!(error.contains("the message has 9 elements, but the buffer has room for 8"), "{error}");
            let error = c.receive(&mut [0_i32; 4], 0, 10).unwrap_err().to_string();
            assert!(error.contains("9 bytes, but an element of the buffer has 4"), "{error}");
        }
        _ => {}
    }
    assert!(c.send(&[1], c.size(), 0).unwrap_err().to_string().contains("there is no rank"));
    assert!(c.send(&[1], 0, -1).unwrap_err().to_string().contains("tag -1"));
}

pub fn more_than_a_c_int_counts(world: &World) {
    let len = (1_usize << 31) + 9;
    let needed = 2 * world.size() * len;
    let mut enough = [i32::from(free_bytes().is_some_and(|free| free > needed))];
    world.communicator().all_reduce(&mut enough, Operation::Min).unwrap();
    if enough[0] == 0 {
        println!("SKIPPED: messages above 2^31 bytes need {needed} bytes of free memory here");
        return;
    }
    let places = [0, 1, len / 2, (1 << 31) - 1, 1 << 31, len - 2, len - 1];
    let marked = |place: usize| (place % 251 + 1) as u8;
    let check = |values: &[u8], expected: &dyn Fn(usize) -> u8| {
        let found: Vec<usize> = (0..len).filter(|&place| values[place] != 0).collect();
        assert_eq!(found, places);
        assert!(found.iter().all(|&place| values[place] == expected(place)));
    };
    let mut values = vec![0_u8; len];
    if world.is_root() {
        places.iter().for_each(|&place| values[place] = marked(place));
        world.communicator().send(&values, 1, 0).unwrap();
        values.fill(0);
    } else {
        assert_eq!(world.communicator().receive(&mut values, 0, 0).unwrap(), len);
        check(&values, &marked);
    }
    world.communicator().broadcast(&mut values, 1).unwrap();
    check(&values, &marked);
    let rank = world.rank() as u8;
    places.iter().for_each(|&place| values[place] = rank + 1);
    world.communicator().all_reduce(&mut values, Operation::Sum).unwrap();
    check(&values, &|_| 3);
}

const ROUNDS: usize = 5;

/// Passes a number that goes around the ranks to the next rank, counted up, [`ROUNDS`] times.
struct Relay {
    all: Communicator,
    left: usize,
    token: Option<Pending<Vec<i64>>>,
    sends: Vec<Pending<Vec<i64>>>,
}

impl Relay {
    fn send(&mut self, number: i64, tag: i32) {
        let next = (self.all.rank() + 1) % self.all.size();
        self.sends.push(self.all.start_send(vec![number], next, tag).unwrap());
    }

    fn receive(&self) -> Pending<Vec<i64>> {
        let size = self.all.size();
        self.all.start_receive(vec![0], (self.all.rank() + size - 1) % size, 0).unwrap()
    }
}

impl Background for Relay {
    fn advance(&mut self) -> bool {
        while let Some(mut token) = self.token.take() {
            if !token.test() {
                self.token = Some(token);
                return false;
            }
            let number = token.wait()[0];
            self.left -= 1;
            if self.left > 0 || !self.all.is_root() {
                self.send(number + 1, 0);
            }
            if self.left == 0 {
                self.send(number, 1);
            } else {
                self.token = Some(self.receive());
            }
        }
        true
    }
}

/// Every rank only waits for one message, which its neighbour's task sends at its end.
pub fn tasks_in_the_background(world: &World) {
    let all = world.communicator().duplicate();
    let (rank, size) = (all.rank(), all.size());
    let mut relay = Relay { all: all.clone(), left: ROUNDS, token: None, sends: Vec::new() };
    relay.token = Some(relay.receive());
    if all.is_root() {
        relay.send(0, 0);
    }
    let relay = Rc::new(RefCell::new(relay));
    attach(&relay);
    let left = (rank + size - 1) % size;
    let found = all.start_receive(vec![0], left, 1).unwrap().wait()[0];
    // the number that the neighbour received last
    let expected = (ROUNDS - 1) * size + (left + size - 1) % size;
    assert_eq!(found, expected as i64);
    // the neighbour's last number may be here, but not yet seen
    while relay.borrow().left > 0 {
        advance();
    }
    let mut relay = relay.borrow_mut();
    relay.sends.drain(..).for_each(|send| drop(send.wait()));
    assert!(relay.left == 0 && relay.token.is_none());
}
