{{/*
One service of one principal: a StatefulSet of one pod, so that there are never two of it; of relays one of several.

dict "root" ROOT "who" (list ROOT ROLE [NAME]) "role" ROLE "secret" SECRET "args" ARGS "port" PORT "of" VALUES
     "grace" SECONDS "state" FOLDER|"" "policy" TEXT|"" "sysctls" LIST "replicas" NUMBER
*/}}
{{- define "sottovoce.statefulset" -}}
{{- $root := .root }}
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {{ include "sottovoce.name" .who }}
  labels: {{- include "sottovoce.labels" .who | nindent 4 }}
spec:
  replicas: {{ .replicas | default 1 }}
  serviceName: {{ include "sottovoce.name" .who }}
  # A pod that never becomes ready is replaced when it is rolled back.
  podManagementPolicy: Parallel
  updateStrategy:
    type: RollingUpdate
  revisionHistoryLimit: 5
  selector:
    matchLabels: {{- include "sottovoce.selector" .who | nindent 6 }}
  template:
    metadata:
      labels: {{- include "sottovoce.labels" .who | nindent 8 }}
      annotations:
        kubectl.kubernetes.io/default-container: {{ .role }}
        {{- with .policy }}
        checksum/policy: {{ sha256sum . }}
        {{- end }}
        {{- with .of.podAnnotations }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    spec:
      serviceAccountName: {{ include "sottovoce.name" (list $root "services") }}
      automountServiceAccountToken: false
      # Its variables would be called like ours.
      enableServiceLinks: false
      terminationGracePeriodSeconds: {{ .grace }}
      {{- with $root.Values.image.pullSecrets }}
      imagePullSecrets: {{- toYaml . | nindent 8 }}
      {{- end }}
      securityContext: {{- include "sottovoce.podSecurity" $root | nindent 8 }}
        {{- with .sysctls }}
        sysctls: {{- toYaml . | nindent 10 }}
        {{- end }}
      {{- with .of.nodeSelector }}
      nodeSelector: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with .of.tolerations }}
      tolerations: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with .of.affinity }}
      affinity: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with .of.priorityClassName }}
      priorityClassName: {{ . }}
      {{- end }}
      containers:
        - name: {{ .role }}
          image: {{ include "sottovoce.image" (list $root .role) }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          command: [sottovoce]
          args:
            {{- range .args }}
            - {{ . | quote }}
            {{- end }}
            {{- if $root.Values.metrics.enabled }}
            - --metrics
            - 0.0.0.0:9400
            {{- end }}
          env:
            {{- range $name, $value := .of.env }}
            - name: {{ $name }}
              value: {{ $value | quote }}
            {{- end }}
            {{- if .replicas }}
            - name: POD_NAME
              valueFrom: {fieldRef: {fieldPath: metadata.name}}
            {{- end }}
            # Where the probes ask, too.
            - name: SOTTOVOCE_LISTEN
              value: 0.0.0.0:{{ .port }}
            - name: SOTTOVOCE_IDENTITY
              value: /etc/sottovoce/identity
          {{- with .of.envFrom }}
          envFrom: {{- toYaml . | nindent 12 }}
          {{- end }}
          ports:
            - name: grpc
              containerPort: {{ .port }}
            {{- if $root.Values.metrics.enabled }}
            - name: metrics
              containerPort: 9400
            {{- end }}
          {{- include "sottovoce.probes" . | nindent 10 }}
          securityContext: {{- include "sottovoce.security" $root | nindent 12 }}
          resources: {{- toYaml .of.resources | nindent 12 }}
          volumeMounts:
            - name: identity
              mountPath: /etc/sottovoce/identity
              readOnly: true
            {{- if .policy }}
            - name: policy
              mountPath: /etc/sottovoce/policy
              readOnly: true
            {{- end }}
            - name: tmp
              mountPath: /tmp
            {{- if .state }}
            - name: state
              mountPath: /var/lib/sottovoce
            {{- end }}
      volumes:
        - {{- include "sottovoce.identity" . | nindent 10 }}
        {{- if .policy }}
        - name: policy
          configMap:
            name: {{ include "sottovoce.name" .who }}
        {{- end }}
        - name: tmp
          emptyDir:
            sizeLimit: 64Mi
  {{- if .state }}
  persistentVolumeClaimRetentionPolicy:
    whenDeleted: Retain
    whenScaled: Retain
  volumeClaimTemplates:
    - metadata:
        name: state
        labels: {{- include "sottovoce.selector" .who | nindent 10 }}
      spec:
        accessModes: [{{ .of.volume.accessMode }}]
        {{- with .of.volume.storageClass }}
        storageClassName: {{ . }}
        {{- end }}
        resources:
          requests:
            storage: {{ .of.volume.size }}
  {{- end }}
{{- end -}}

{{/* The address of one principal: dict "who" (list ROOT ROLE [NAME]) "port" PORT "of" VALUES "headless" BOOL */}}
{{- define "sottovoce.service" -}}
{{- $service := .of.service | default dict }}
apiVersion: v1
kind: Service
metadata:
  name: {{ include "sottovoce.name" .who }}
  labels: {{- include "sottovoce.labels" .who | nindent 4 }}
  {{- with $service.annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- if .headless }}
  clusterIP: None
  {{- else }}
  type: {{ $service.type }}
  {{- if ne $service.type "ClusterIP" }}
  # Network policies see who calls.
  externalTrafficPolicy: Local
  {{- end }}
  {{- end }}
  # Neighbours find whoever is starting, too.
  publishNotReadyAddresses: true
  selector: {{- include "sottovoce.selector" .who | nindent 4 }}
  ports:
    - name: grpc
      port: {{ .port }}
      targetPort: grpc
      {{- with $service.nodePort }}
      nodePort: {{ . }}
      {{- end }}
{{- end -}}

{{/*
Whether the service answers its own identity: the kubelet's gRPC probes have none to show. Ready is who listens: nothing but a
drain waits for it, and asking costs a process.
*/}}
{{- define "sottovoce.probes" -}}
startupProbe:
  exec:
    command: [python, -m, sottovoce_rpc.health]
  periodSeconds: 3
  timeoutSeconds: 10
  failureThreshold: 100
livenessProbe:
  exec:
    command: [python, -m, sottovoce_rpc.health]
  periodSeconds: 60
  timeoutSeconds: 20
  failureThreshold: 3
readinessProbe:
  tcpSocket:
    port: grpc
  periodSeconds: 10
  timeoutSeconds: 5
{{- end -}}

{{/* The profile "restricted" of Kubernetes' pod security standards. */}}
{{- define "sottovoce.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.image.user }}
runAsGroup: {{ .Values.image.user }}
fsGroup: {{ .Values.image.user }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}
{{- define "sottovoce.security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}
