package main

import (
	"fmt"
	"io"
	"sync"
	"time"

	"code.cloudfoundry.org/garden"
)

// The containers, which behave as guardian's do where backends differ.
type backend struct {
	// Makes containers real. Nil: they are not.
	runc       *runc
	lock       sync.Mutex
	containers map[string]*container
}

func newBackend() *backend {
	return &backend{containers: map[string]*container{}}
}

func errInUse(handle string) error { return fmt.Errorf("Handle '%s' already in use", handle) }

func (b *backend) Start() error                             { return nil }
func (b *backend) Stop() error                              { return nil }
func (b *backend) Ping() error                              { return nil }
func (b *backend) GraceTime(garden.Container) time.Duration { return 0 }
func (b *backend) Capacity() (garden.Capacity, error) {
	return garden.Capacity{MemoryInBytes: 1 << 30, DiskInBytes: 1 << 30, MaxContainers: 250}, nil
}

func (b *backend) killAll() {
	b.lock.Lock()
	defer b.lock.Unlock()
	for _, c := range b.containers {
		_ = c.end()
	}
	if b.runc != nil {
		_ = b.runc.remove()
	}
}

func (b *backend) Create(spec garden.ContainerSpec) (garden.Container, error) {
	properties := garden.Properties{}
	for name, value := range spec.Properties {
		properties[name] = value
	}
	c := &container{spec: spec, properties: properties, processes: map[string]*process{}}
	if b.runc != nil {
		bundle, err := b.runc.create(spec)
		if err != nil {
			return nil, err
		}
		c.bundle = bundle
	}
	b.lock.Lock()
	defer b.lock.Unlock()
	if _, exists := b.containers[spec.Handle]; exists || spec.Handle == "" {
		_ = c.end()
		return nil, errInUse(spec.Handle)
	}
	b.containers[spec.Handle] = c
	return c, nil
}

func (b *backend) Destroy(handle string) error {
	c, err := b.Lookup(handle)
	if err != nil {
		return err
	}
	if err := c.(*container).end(); err != nil {
		return err
	}
	b.lock.Lock()
	defer b.lock.Unlock()
	delete(b.containers, handle)
	return nil
}

func (b *backend) Containers(wanted garden.Properties) ([]garden.Container, error) {
	b.lock.Lock()
	defer b.lock.Unlock()
	var found []garden.Container
	for _, c := range b.containers {
		if c.has(wanted) {
			found = append(found, c)
		}
	}
	return found, nil
}

func (b *backend) Lookup(handle string) (garden.Container, error) {
	b.lock.Lock()
	defer b.lock.Unlock()
	if c, ok := b.containers[handle]; ok {
		return c, nil
	}
	return nil, garden.ContainerNotFoundError{Handle: handle}
}

func (b *backend) BulkInfo(handles []string) (map[string]garden.ContainerInfoEntry, error) {
	entries := map[string]garden.ContainerInfoEntry{}
	for _, handle := range handles {
		c, err := b.Lookup(handle)
		if err != nil {
			entries[handle] = garden.ContainerInfoEntry{Err: garden.NewError(err.Error())}
			continue
		}
		info, _ := c.Info()
		entries[handle] = garden.ContainerInfoEntry{Info: info}
	}
	return entries, nil
}

func (b *backend) BulkMetrics([]string) (map[string]garden.ContainerMetricsEntry, error) {
	return map[string]garden.ContainerMetricsEntry{}, nil
}

type container struct {
	spec garden.ContainerSpec
	// Nil: it is nothing but its processes.
	bundle *bundle

	naming     sync.Mutex
	properties garden.Properties

	// Kept while a process starts.
	lock      sync.Mutex
	processes map[string]*process
}

func (c *container) has(wanted garden.Properties) bool {
	c.naming.Lock()
	defer c.naming.Unlock()
	for name, value := range wanted {
		if c.properties[name] != value {
			return false
		}
	}
	return true
}

func (c *container) Handle() string { return c.spec.Handle }

func (c *container) Stop(kill bool) error {
	c.lock.Lock()
	var processes []*process
	for _, p := range c.processes {
		processes = append(processes, p)
	}
	c.lock.Unlock()
	if kill && c.bundle != nil {
		if err := c.bundle.kill(); err != nil {
			return err
		}
	}
	for _, p := range processes {
		p.stop(kill)
	}
	return nil
}

// Ends all that there is of it on the machine.
func (c *container) end() error {
	if c.bundle != nil {
		return c.bundle.destroy()
	}
	return c.Stop(true)
}

func (c *container) Info() (garden.ContainerInfo, error) {
	properties, err := c.Properties()
	return garden.ContainerInfo{State: "active", Properties: properties}, err
}

func (c *container) Run(spec garden.ProcessSpec, pio garden.ProcessIO) (garden.Process, error) {
	c.lock.Lock()
	defer c.lock.Unlock()
	if _, exists := c.processes[spec.ID]; exists {
		return nil, fmt.Errorf("process ID '%s' already in use", spec.ID)
	}
	p, err := c.start(spec, pio)
	if err != nil {
		return nil, err
	}
	c.processes[spec.ID] = p
	return p, nil
}

func (c *container) start(spec garden.ProcessSpec, pio garden.ProcessIO) (*process, error) {
	if c.bundle != nil {
		return c.bundle.startProcess(spec, pio)
	}
	return startProcess(c.spec, spec, pio)
}

func (c *container) Attach(id string, pio garden.ProcessIO) (garden.Process, error) {
	c.lock.Lock()
	p, ok := c.processes[id]
	c.lock.Unlock()
	if !ok {
		return nil, garden.ProcessNotFoundError{ProcessID: id}
	}
	p.attach(pio)
	return p, nil
}

func (c *container) Properties() (garden.Properties, error) {
	c.naming.Lock()
	defer c.naming.Unlock()
	properties := garden.Properties{}
	for name, value := range c.properties {
		properties[name] = value
	}
	return properties, nil
}

func (c *container) Property(name string) (string, error) {
	c.naming.Lock()
	defer c.naming.Unlock()
	if value, ok := c.properties[name]; ok {
		return value, nil
	}
	return "", fmt.Errorf("property does not exist: %s", name)
}

func (c *container) SetProperty(name string, value string) error {
	c.naming.Lock()
	defer c.naming.Unlock()
	c.properties[name] = value
	return nil
}

func (c *container) RemoveProperty(name string) error {
	c.naming.Lock()
	defer c.naming.Unlock()
	delete(c.properties, name)
	return nil
}

var errNotImplemented = fmt.Errorf("not implemented")

func (c *container) StreamIn(garden.StreamInSpec) error { return errNotImplemented }
func (c *container) StreamOut(garden.StreamOutSpec) (io.ReadCloser, error) {
	return nil, errNotImplemented
}
func (c *container) CurrentBandwidthLimits() (garden.BandwidthLimits, error) {
	return c.spec.Limits.Bandwidth, nil
}
func (c *container) CurrentCPULimits() (garden.CPULimits, error)   { return c.spec.Limits.CPU, nil }
func (c *container) CurrentDiskLimits() (garden.DiskLimits, error) { return c.spec.Limits.Disk, nil }
func (c *container) CurrentMemoryLimits() (garden.MemoryLimits, error) {
	return c.spec.Limits.Memory, nil
}
func (c *container) NetIn(uint32, uint32) (uint32, uint32, error) { return 0, 0, errNotImplemented }
func (c *container) NetOut(garden.NetOutRule) error               { return nil }
func (c *container) BulkNetOut([]garden.NetOutRule) error         { return nil }
func (c *container) Metrics() (garden.Metrics, error)             { return garden.Metrics{}, nil }
func (c *container) SetGraceTime(time.Duration) error             { return nil }
